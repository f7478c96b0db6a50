"""What a run tells: the line that moves, the lines that stay, the files that remain."""
