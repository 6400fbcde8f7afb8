from teachonce.student_predict.cli import main

main()
