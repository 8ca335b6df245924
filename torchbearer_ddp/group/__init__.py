"""Who the ranks are, how they meet, wait for each other and exchange small values."""
