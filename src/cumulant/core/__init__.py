"""What every room needs and nobody should write twice."""
