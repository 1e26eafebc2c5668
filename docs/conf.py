"""How the documentation is built (`make docs`); neither building nor reading it needs the network."""

from __future__ import annotations

import os

from sphinx_gallery.sorting import ExplicitOrder

import equipool

os.environ.setdefault("MPLBACKEND", "Agg")

project = "equipool"
author = "The equipool developers"
project_copyright = author
version = release = equipool.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_build", "auto_examples/**/*.ipynb", "auto_examples/**/*.py*"]

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_ivar = False
napoleon_attr_annotations = False

EXAMPLES = (
    "plot_harmonize_table.py",
    "plot_disjoint_ages.py",
    "plot_leave_one_site_out.py",
    "plot_brain_images.py",
    "plot_sphere_rotation.py",
    "plot_own_encoder.py",
    "plot_fairness_table.py",
)
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"plot_",
    "within_subsection_order": ExplicitOrder(EXAMPLES),
    "download_all_examples": False,
    "notebook_extensions": (),
    "capture_repr": (),
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "abort_on_example_error": True,
}

html_theme = "furo"
html_title = f"equipool {release}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
