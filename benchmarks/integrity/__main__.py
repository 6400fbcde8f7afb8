from benchmarks.integrity.integrity import main

if __name__ == "__main__":
    main()
