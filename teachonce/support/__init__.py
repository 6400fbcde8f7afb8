"""What every package needs: errors, console, signals, files, threads, arrays."""
