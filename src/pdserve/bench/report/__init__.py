"""What a run of the load generator found, for people: a page of plots, and one run against another.

Owns the page's HTML and SVG, and the statistics of a comparison. Must not know servers or how a load is sent: it reads
`bench/load/result.py` alone. Start reading at `page.write_report` and `compare.compare_files`.
"""
