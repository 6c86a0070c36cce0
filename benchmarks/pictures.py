"""Draw the pictures of the README as SVG: one for a light page and one for a dark page."""

import io

from sparsam.report.styles import COLOURS, style

THEMES = ("light", "dark")
WIDTH = 700  # pixels
# GitHub's fonts, and its colours of less important text and of borders.
FONTS = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
GREY = {"light": "#59636e", "dark": "#9198a1"}
FAINT = {"light": "#d1d9e0", "dark": "#3d444d"}
PAGE = {"light": "#ffffff", "dark": "#0d1117"}


class Picture:
    """An empty picture and the colours of its page.

    Args:
        theme: "light" or "dark".
        height: In pixels.
    """

    def __init__(self, theme, height):
        from matplotlib.figure import Figure

        self.theme, self.height = theme, height
        self.ink, self.grey = COLOURS["ink"][theme == "dark"], GREY[theme]
        self.faint, self.page = FAINT[theme], PAGE[theme]
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor=self.page)

    def axes(self, place):
        """Add axes without a frame or tick marks; place is left, bottom, width and height as fractions."""
        axes = self.figure.add_axes(place, facecolor=self.page)
        axes.tick_params(colors=self.grey, length=0, pad=6)
        axes.spines[:].set_visible(False)
        return axes

    def colour(self, method):
        """Return the colour of a kind of method."""
        return COLOURS[style(method).colour][self.theme == "dark"]


def draw(theme, height, content):
    """Return a picture as SVG; content is a function that draws into a Picture."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": theme, "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 14}):
        picture = Picture(theme, height)
        content(picture)
        file = io.StringIO()
        picture.figure.savefig(file, format="svg", metadata={"Creator": None, "Date": None})
    return file.getvalue().replace("'DejaVu Sans'", FONTS)


def changed(texts):
    """Return the files whose text would change; texts maps each file to its text."""
    return [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
