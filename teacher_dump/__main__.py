from teachonce.teacher_dump.cli import main

main()
