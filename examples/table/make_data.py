"""Writes a table, so that the example runs before you have your own."""

import csv
import random
from pathlib import Path


def main() -> None:
    """Writes ``table.csv``: three columns of numbers, and a last one that follows from them."""
    draw = random.Random(0)
    with Path("table.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["width", "height", "age", "price"])
        for _ in range(2000):
            width, height, age = draw.uniform(1, 4), draw.uniform(1, 4), draw.uniform(0, 10)
            rows.writerow([f"{width:.3f}", f"{height:.3f}", f"{age:.3f}", f"{width * height - 0.3 * age:.3f}"])


if __name__ == "__main__":
    main()
