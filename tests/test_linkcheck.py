"""The weekly question to other sites, asked of a server on loopback."""

import http.server
import socket
import subprocess
import threading

import pytest

from ddplab.linkcheck import Link, check_links, main, page

ANSWERS = {"/good": 200, "/gone": 410, "/missing": 404, "/private": 403, "/broken": 500}


class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/moved":
            self.send_response(301)
            self.send_header("Location", "/good")
        else:
            self.send_response(ANSWERS[self.path])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """What the checker says of a small book whose links have every kind of answer: {end of address: link}."""
    root = tmp_path_factory.mktemp("book")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    base = f"http://127.0.0.1:{server.server_port}"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        lines = [f"[{path}]({base}{path})\n" for path in [*ANSWERS, "/moved"]]
        lines += [f"[closed](http://127.0.0.1:{closed.getsockname()[1]}/closed)\n", "[inside](#a-book)\n"]
        (root / "book.md").write_text("# A book\n\n" + "\n".join(lines))
        (root / "_toc.yml").write_text("format: jb-book\nroot: book\n")
        (root / "_config.yml").write_text("title: small\nonly_build_toc_files: true\n")
        try:
            found = check_links(root)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
    assert not (root / "_build").exists()
    return {link.url.rpartition("/")[2]: link for link in found}


def test_dead_alive_and_unknown(links):
    states = {name: link.state for name, link in links.items()}
    assert states == {
        "good": "ok", "moved": "ok", "gone": "dead", "missing": "dead",
        "private": "unknown", "broken": "unknown", "closed": "unknown",
    }  # fmt: skip


def test_a_link_is_named_with_its_page_and_line(links):
    assert (links["missing"].page, links["missing"].line) == ("book.md", 7)
    assert links["missing"].answer.startswith("404 Client Error")


def test_the_page_and_the_exit_code(links, monkeypatch, tmp_path, capsys):
    text = page(list(links.values()))
    assert text.startswith("# 7 links: 2 dead, 3 to be tried by hand\n\n## Dead\n")
    assert text.index("/gone") < text.index("## No clear answer") < text.index("/private")
    for found, code in [(links.values(), 1), ([links["good"], links["broken"]], 0), ([links["closed"]], 1)]:
        monkeypatch.setattr("ddplab.linkcheck.check_links", lambda root, found=found: list(found))
        assert main([str(tmp_path)]) == code
    assert "is there a network?" in capsys.readouterr().err
    assert (tmp_path / "_build/links.md").read_text().startswith("# 1 links: 0 dead, 1 to be tried")


def test_names_that_do_not_exist_are_dead():
    from ddplab.linkcheck import _link

    info = "HTTPSConnectionPool(host='x.invalid', port=443): NameResolutionError: Name or service not known"
    answer = {"filename": "a.md", "lineno": 1, "uri": "https://x.invalid", "status": "broken", "code": 0, "info": info}
    assert _link(answer) == Link("a.md", 1, "https://x.invalid", "dead", info)


def test_a_book_that_sphinx_cannot_read(tmp_path, capsys, monkeypatch):
    (tmp_path / "_config.yml").write_text("title: small\n")
    ended = subprocess.CompletedProcess([], 1, "", "no table of contents")
    monkeypatch.setattr("ddplab.linkcheck.subprocess.run", lambda *args, **options: ended)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: the links were not checked:\nno table of contents\n"
