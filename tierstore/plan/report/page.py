"""A plan as one page of HTML that asks nothing of a network: plotly and all figures are in it.

What comes from files is escaped where it enters: in text by the template, in plots by ``figure.label``.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ...settings.sections import to_toml
from ..json_file import plain
from ..result import PlanResult
from . import words
from .plots import plots_of

if TYPE_CHECKING:
    import jinja2


def page_of(result: PlanResult) -> str:
    """The page, in UTF-8 some 5 MB.

    Raises:
        ImportError: plotly is not installed.
    """
    sections = plots_of(result)
    figures = {plot.name: plain(plot.figure) for group in sections.values() for plot in group}
    tiers = [tier for tier in result.prediction.tiers if tier.tier in ("hbm", "ddr")]
    return template("page.html").render(
        result=result,
        prediction=result.prediction,
        say=words,
        in_memory=1 - math.prod(1 - tier.hit_rate for tier in tiers),
        sections=sections,
        figures=figures,
        plan_file=to_toml(result.asked),
        plotly=plotly_source(),
    )


def template(name: str) -> "jinja2.Template":
    """A file beside this one, whose filters are ``words``."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page.filters |= {each: getattr(words, each) for each in words.__all__}
    return page.get_template(name)


def plotly_source() -> str:
    """Its JavaScript, whole.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"{error}; a page needs one more package: pip install 'PATH_OF_THE_CHECKOUT[plan]'") from None
    return str(get_plotlyjs())
