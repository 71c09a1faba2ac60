"""The page: template, style and scripts."""
