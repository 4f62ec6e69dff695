"""Measuring kernops against other libraries: ``python -m kernops.bench --help``.

``cases`` says what is computed, ``peers`` who computes it, ``protocol`` how it is timed, ``report`` how it is shown.
Every speed claim of the documentation comes from here and can be measured again.
"""
