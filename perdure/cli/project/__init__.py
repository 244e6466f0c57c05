"""`perdure init`: a small project to begin with. `scaffold` makes it of the files in `templates`.

A template is a folder of files that end in `.in`, laid over those of `common`. `{{name}}`, `{{module}}`, `{{about}}`,
`{{version}}` and `{{try}}` are filled in, in names of folders `__module__` is, and `dot_` stands for a dot.
"""
