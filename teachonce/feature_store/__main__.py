from teachonce.feature_store.cli import main

main()
