"""The site: `sphinx-build -W -b html docs build/site`. No page of it needs the network."""

from __future__ import annotations

import sys
from pathlib import Path

import cumulant
from cumulant.figures import COLORS, INK

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Cumulant"
author = "The Cumulant authors"
copyright = author
version = release = cumulant.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_parser",
    "anchors",
    "mathml",
]
exclude_patterns = ["_ext"]
default_role = "py:obj"
highlight_language = "none"
smartquotes_action = "D"  # dashes between names and what they are; quotes stay as written

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "anchors.slug"

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_display_short_literal_types = True
autosummary_generate = False
napoleon_use_ivar = True

html_math_renderer = "mathml"
html_theme = "furo"
pygments_dark_style = "a11y-high-contrast-dark"
html_title = f"Cumulant {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# The house colors, and what they become on a dark page.
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": COLORS[0],
        "color-brand-content": COLORS[0],
        "color-brand-visited": COLORS[3],
        "color-foreground-primary": INK,
        "color-api-name": COLORS[0],
        "color-api-pre-name": "#565d70",
        "color-code-background": "#f3f5f9",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8db4f2",
        "color-brand-content": "#8db4f2",
        "color-brand-visited": "#c39be6",
        "color-background-primary": "#11151f",
        "color-background-secondary": "#181d2a",
        "color-foreground-primary": "#e7eaf3",
        "color-api-name": "#8db4f2",
        "color-api-pre-name": "#a7afc2",
        "color-code-background": "#181d2a",
    },
}
