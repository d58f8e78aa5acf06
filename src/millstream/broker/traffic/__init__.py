"""What keeps publishers and subscribers apart: live delivery, duplicates, limits, back-pressure, service modes."""
