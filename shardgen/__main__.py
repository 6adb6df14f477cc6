from shardgen.cli import main

# Worker processes import this module under another name.
if __name__ == "__main__":
    main()
