from benchmarks.reproduce.reproduce import main

if __name__ == "__main__":
    main()
