"""One file for each seam of PyTorch where compression needs to know more than a bare group sees."""
