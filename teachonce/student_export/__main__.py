from teachonce.student_export.cli import main

main()
