from teachonce.downstream.cli import main

main()
