from teachonce.student_train.cli import main

main()
