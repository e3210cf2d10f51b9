"""The ground floor: errors, counts, files from other machines, texts in two languages. It imports nothing of ours."""
