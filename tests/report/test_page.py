from html.parser import HTMLParser

from hetxl.report.markup import tag
from hetxl.report.page import POLICY, page, section


class Reader(HTMLParser):
    """Collects tags and checks that they nest."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_loads_nothing():
    text = page("<T> & co", section("one", "One <1>", tag("p", "text")))
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>&lt;T&gt; &amp; co</title>" in text
    policy = next(attrs for name, attrs in reader.seen if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == POLICY
    assert not any(name in ("script", "link", "iframe") for name, _ in reader.seen)
    assert not any("src" in attrs or "href" in attrs for _, attrs in reader.seen)
    assert "url(" not in text
    assert "@import" not in text


def test_a_section_has_its_heading():
    assert section("a", "B", "c") == '<section id="a"><h2>B</h2><div>c</div></section>'
    made = section("a", "B", "c", plots=True, lead=tag("p", "d"))
    assert made == '<section id="a"><h2>B</h2><p>d</p><div class="plots">c</div></section>'
