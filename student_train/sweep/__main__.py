from teachonce.student_train.sweep.cli import main

main()
