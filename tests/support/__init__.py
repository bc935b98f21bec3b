"""What several test files share: calls to make, and properties to check of them."""
