"""`secure-fvi watch`: a run in a browser on this machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--port", default=0, show_default="a free one", type=click.IntRange(0, 65535), help="On 127.0.0.1.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def watch(folder: Path, port: int, debug: bool) -> None:
    """Show the run in FOLDER on a page for this machine alone: rounds, objective, cohort, budgets left.

    The page is read-only. Its link has a token; whoever has the link and an account on this machine sees the page.
    """
    from secure_fvi.runs.watching import Watch

    with Watch(folder, port) as server:
        click.echo(f"open {server.link} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()
