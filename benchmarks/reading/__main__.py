from benchmarks.reading.reading import main

if __name__ == "__main__":
    main()
