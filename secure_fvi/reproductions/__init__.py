"""Experiments of the papers, and of the issues that asked for numbers, one a module; `secure-fvi reproduce`."""

#: What `secure-fvi reproduce` knows: name, and where its function (out folder, quick, tell) -> content is.
REPRODUCTIONS = {"sfvi-six-cities": "secure_fvi.reproductions.six_cities:reproduce"}
