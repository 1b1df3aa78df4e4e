"""What each path of the page answers."""
