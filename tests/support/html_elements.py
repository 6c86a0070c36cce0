"""Pages as lists of elements."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every element with its attributes and the text right inside it."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data

    def of(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]
