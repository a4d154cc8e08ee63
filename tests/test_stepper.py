"""The stepper in a real browser: its states and every frame are compared with the schedules that it draws."""

from __future__ import annotations

from typing import Any

import pytest
from figure_pages import CELLS, FRAMES, IMPORT, OTHERS, RINGS, cells, frames, go, known_ring, listed, step_of

import ddplab as dl
from ddplab.figures import VARIANTS, RingStepper, Stepper

PACE_MS = 1400  # between two steps while it plays


# ---- the rule and the states


def test_javascript_states_equal_the_schedules(browser: Any) -> None:
    page = browser.new_page()
    got = page.evaluate(
        f"""async ([source, rings]) => {{ const {{ default: stepper }} = await {IMPORT};
          return rings.map(([variant, n]) => {{ const ring = stepper.ring(n, variant);
            return {{ transfers: ring.transfers, reduce: ring.reduce_steps, states: stepper.states(ring) }} }}) }}""",
        [RingStepper.esm(), RINGS],
    )
    for (variant, ranks), drawn in zip(RINGS, got, strict=True):
        schedule = known_ring(variant, ranks)
        assert drawn["transfers"] == [list(row) for row in schedule.transfers], (variant, ranks)
        assert drawn["states"] == listed(schedule.states()), (variant, ranks)
        assert drawn["reduce"] == schedule.reduce_steps

    passed = [Stepper(schedule).state["schedule"] for schedule in OTHERS]
    states = page.evaluate(
        f"async ([source, all]) => {{ const m = await {IMPORT}; return all.map(m.default.states) }}",
        [Stepper.esm(), passed],
    )
    assert states == [listed(schedule.states()) for schedule in OTHERS]
    page.close()


def test_a_contribution_counted_twice_is_shown_twice(browser: Any) -> None:
    twice = dl.Schedule.from_rows("twice", 2, 1, [(0, 0, 1, 0, 1), (1, 0, 1, 0, 1), (2, 0, 1, 0, 1)])
    page = browser.new_page()
    state = page.evaluate(
        f"async ([source, schedule]) => (await {IMPORT}).default.states(schedule)",
        [Stepper.esm(), Stepper(twice).state["schedule"]],
    )
    assert state == listed(twice.states())
    assert state[-1] == [[[0]], [[0, 0, 1]]]
    page.close()


def test_variants_are_those_of_the_claim() -> None:
    """C21's table: what GPU0 sends first, to whom, and the chunk it owns after the reduce phase, chunks from 1."""
    table = {"article": ("A2", 1, 3), "textbook": ("A1", 1, 2), "nccl": ("A4", 1, 1), "gloo": ("A2", 3, 1)}
    assert table.keys() == VARIANTS.keys()
    for variant, (sent, to, owned) in table.items():
        schedule = known_ring(variant, 4)
        first = next(row for row in schedule.transfers if row.step == 0 and row.src == 0)
        assert (f"A{first.chunk + 1}", first.dst) == (sent, to)
        assert schedule.verify()[0] + 1 == owned


# ---- the page


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_mouse_and_keyboard_drive_it(show: Any, scheme: str) -> None:
    watched = show(RingStepper(4), scheme=scheme)
    page, slider = watched.page, watched.page.locator(".ddp-slider")
    assert step_of(page) == "step 0 of 6, start"
    before = page.locator(".ddplab-figure").inner_html()

    page.get_by_role("button", name="One step forward").click()
    assert step_of(page) == "step 1 of 6, reduce-scatter"
    assert page.locator(".ddplab-figure").inner_html() != before
    assert [row[0][0] for row in cells(page)] == ["A1+D1", "B1", "C1", "D1"]
    spoken = page.locator("[aria-live=polite]").text_content()
    assert all(f"GPU{a} sent {x} to GPU{b}" in spoken for a, x, b in [(0, "A2", 1), (1, "B3", 2), (3, "D1", 0)])
    page.get_by_role("button", name="One step back").click()
    assert step_of(page) == "step 0 of 6, start"

    slider.focus()
    for key, expected in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 6), ("Home", 0)]:
        page.keyboard.press(key)
        assert step_of(page).startswith(f"step {expected} of 6"), key

    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 11, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=5)
    assert step_of(page).startswith("step 3 of 6")
    page.mouse.up()

    play = page.get_by_role("button", name="Play")
    play.focus()
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)  # from here on the page's time is the test's
    page.keyboard.press(" ")
    page.clock.run_for(PACE_MS - 1)
    assert step_of(page).startswith("step 3 of 6")
    page.clock.run_for(1)
    assert step_of(page).startswith("step 4 of 6")
    page.get_by_role("button", name="Pause").click()
    assert page.get_by_role("button", name="Play").is_visible()
    page.clock.run_for(10 * PACE_MS)
    assert step_of(page).startswith("step 4 of 6")
    page.keyboard.press(" ")  # goes on, and stops by itself at the end
    page.clock.run_for(2 * PACE_MS)
    assert step_of(page).startswith("step 6 of 6")
    page.get_by_role("button", name="Play").wait_for()
    assert watched.problems == [] and watched.outside == []


def test_ranks_variant_and_payload_are_chosen_in_the_figure(show: Any) -> None:
    watched = show(RingStepper(4, step=3))
    page = watched.page
    page.get_by_role("button", name="gloo").click()
    assert step_of(page) == "step 3 of 6, reduce-scatter"
    assert cells(page)[0][0] == ["SUM1", "+", "★"]
    page.get_by_label("Ranks", exact=True).select_option(
        "8"
    )  # the end of reduce-scatter stays the end of reduce-scatter
    assert step_of(page) == "step 7 of 14, reduce-scatter"
    page.get_by_label("Gradient S").select_option("25600000")
    assert page.locator(".ddp-who").first.text_content() == "GPU0 A22.4 MB"  # 7/8 of 25.6 MB
    page.get_by_label("Ranks", exact=True).select_option("2")
    assert step_of(page) == "step 1 of 2, reduce-scatter"
    assert page.get_by_role("button", name="gloo").get_attribute("aria-pressed") == "true"
    assert watched.problems == []


def test_every_frame_shows_what_the_schedule_says(show: Any) -> None:
    """Sums, events, owners, arrows and bytes, for every variant, number of ranks and step."""
    page = show(RingStepper(2)).page
    size, units = 102.4e6, {"B": 1, "kB": 1e3, "MB": 1e6}
    look = f"""() => [({CELLS})(), document.querySelectorAll('.ddp-busy').length,
      document.querySelectorAll('.ddp-parcel').length,
      [...document.querySelectorAll('.ddp-who > span')].map(e => e.textContent)]"""
    for variant, ranks in RINGS:
        schedule = known_ring(variant, ranks)
        states, owners = schedule.states(), schedule.verify()
        for step, (table, arrows, labels, counts) in enumerate(frames(page, variant, ranks, look)):
            where = (variant, ranks, step)
            sent = [row for row in schedule.transfers if row.step == step - 1]
            assert arrows == labels == len(sent), where
            for count in counts:  # shown with four digits
                number, unit = count.split()
                assert float(number) * units[unit] == pytest.approx(step * size / ranks, rel=1e-3), where
            events = {(row.src, row.chunk): "↗" for row in sent}
            events |= {(row.dst, row.chunk): "+" if row.reduce else "=" for row in sent}
            for rank, row in enumerate(table):
                for chunk, cell in enumerate(row):
                    held = states[step][rank][chunk]
                    full = held == tuple(range(ranks))
                    status = "★" if full and step >= ranks - 1 and owners[rank] == chunk else "✓" if full else ""
                    if variant == "article" and step == ranks - 1 and rank == chunk and not full:
                        status = "✗"  # here the article shows the full sum of chunk r on GPU r
                    total = f"SUM{chunk + 1}" if full else "+".join(f"{chr(65 + r)}{chunk + 1}" for r in held)
                    assert cell == [total, events.get((rank, chunk), ""), status], (*where, rank, chunk)
        assert step == schedule.steps


def test_where_the_article_breaks(show: Any) -> None:
    page = show(RingStepper(4, step=3)).page
    assert cells(page)[0][0] == ["A1+D1", "", "✗"]
    note = page.locator(".ddp-alarm").text_content()
    assert all(word in note for word in ("C21", "GPU0", "A1+D1", "B1 and C1 are missing", "GPU0 owns SUM3"))
    go(page, 2)
    assert page.locator(".ddp-alarm").count() == 0
    go(page, 4)
    assert "C24" in page.locator(".ddp-note").text_content()
    page.get_by_label("Ranks", exact=True).select_option("2")  # r + 1 and r - 1 are the same chunk: nothing to mark
    go(page, 1)
    assert page.locator(".ddp-alarm").count() == 0 and "by luck" in page.locator(".ddp-note").text_content()


@pytest.mark.parametrize("schedule", OTHERS, ids=lambda s: f"{s.name}{s.ranks}")
def test_any_small_schedule_can_be_driven(show: Any, schedule: dl.Schedule) -> None:
    watched = show(Stepper(schedule))
    page = watched.page
    said = page.evaluate(f"() => ({FRAMES})(() => document.querySelector('.ddp-slider').ariaValueText)")
    assert [text.split(",")[0] for text in said] == [f"step {step} of {schedule.steps}" for step in range(len(said))]
    assert len(said) == schedule.steps + 1
    assert {status for row in cells(page) for _, _, status in row} <= {"✓", "★"}
    number, unit = page.locator(".ddp-cost b").first.text_content().split()
    total = float(number) * {"B": 1, "MB": 1e6, "GB": 1e9}[unit]
    assert total == pytest.approx(len(schedule.transfers) * 102.4e6 / schedule.chunks, rel=1e-3)
    assert watched.problems == []


# ---- hosts as boxes

ON_HOSTS = [
    (dl.hierarchical(2, 4), 4),
    (dl.hierarchical(2, 2), 2),
    (dl.hierarchical(3, 2), 2),
    (dl.ring(8), 4),
    (dl.ring(8), 2),
    (dl.direct(4), 2),
    (dl.ring(4), 4),
]


def test_a_hierarchical_schedule_is_drawn_on_hosts() -> None:
    assert dl.hierarchical(2, 4).figure().state["schedule"]["ranks_per_host"] == 4
    assert dl.hierarchical(4, 2).figure().state["schedule"]["ranks_per_host"] == 2
    for circle in (dl.hierarchical(1, 4), dl.hierarchical(4, 1), dl.hierarchical(8, 2), dl.tree(8)):
        assert "ranks_per_host" not in circle.figure().state["schedule"]
    three = [("reduce-scatter inside", 3), ("all-reduce across", 2), ("all-gather inside", 3)]
    assert dl.hierarchical(2, 4).figure().state["schedule"]["phases"] == three
    assert Stepper(dl.ring(8), ranks_per_host=4).state["schedule"]["phases"] is None  # inside and across at once
    for bad in (0, 3, 1, True, 2.0, "4"):
        with pytest.raises(ValueError, match="ranks_per_host|on each host must divide"):
            Stepper(dl.ring(8), ranks_per_host=bad)


@pytest.mark.parametrize(("schedule", "g"), ON_HOSTS, ids=lambda v: getattr(v, "name", str(v)))
def test_hosts_show_what_crosses_between_them(show: Any, schedule: dl.Schedule, g: int) -> None:
    """Arrows by kind, the bytes that left each host, and labels that neither overlap nor leave the picture."""
    watched = show(Stepper(schedule, ranks_per_host=g, nbytes=schedule.chunks * 1000))
    look = """() => {
      const all = q => [...document.querySelectorAll(q)], box = e => e.getBoundingClientRect();
      const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      const frame = box(document.querySelector('.ddp-ring')), labels = all('.ddp-parcel rect').map(box);
      const crossed = labels.flatMap((a, i) => labels.slice(i + 1).filter(b => meet(a, b))).length;
      const away = labels.filter(r => r.left < frame.left || r.right > frame.right || r.bottom > frame.bottom).length;
      return [all('.ddp-busy.ddp-inner').length, all('.ddp-busy.ddp-outer').length, crossed, away,
        all('.ddp-ring text').map(e => e.textContent).filter(t => t.startsWith('sent out')),
        document.querySelector('.ddp-ring').getAttribute('aria-label')]; }"""
    for step, (inner, outer, crossed, away, out, label) in enumerate(
        watched.page.evaluate(f"() => ({FRAMES})({look})")
    ):
        pairs = {(t.src, t.dst) for t in schedule.transfers if t.step == step - 1}
        assert outer == sum(src // g != dst // g for src, dst in pairs), step
        assert inner == len(pairs) - outer and crossed == away == 0, step
        left = [0] * (schedule.ranks // g)
        for t in schedule.transfers:
            left[t.src // g] += t.step < step and t.src // g != t.dst // g
        assert out == [f"sent out {f'{chunks} kB' if chunks else '0 B'}" for chunks in left], step
        assert (f"{outer} from host to host" in label) if pairs else "nothing sent yet" in label
    assert watched.problems == []


def test_hosts_for_those_who_listen_or_print() -> None:
    figure = dl.hierarchical(2, 4).figure()
    assert "8 ranks on hosts of 4" in figure.text()
    assert "host 0" in figure.svg() and "host 1" in figure.svg() and figure.svg().count("<circle") == 8


# ---- how it looks: phone, paper, theme, motion


def test_nothing_overflows_or_overlaps_on_a_phone(show: Any) -> None:
    page = show(RingStepper(2), viewport={"width": 390, "height": 844}).page
    look = """() => {
      const box = e => e.getBoundingClientRect(), all = q => [...document.querySelectorAll(q)];
      const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      const spilt = all('.ddp-cell').filter(cell => { const words = document.createRange();
        words.selectNodeContents(cell.querySelector('.ddp-words'));
        const [text, room] = [box(words), box(cell)];
        return text.left < room.left || text.right > room.right || text.bottom > room.bottom; });
      const things = all('.ddp-box, .ddp-parcel rect').map(box);
      const crossed = things.flatMap((a, i) => things.slice(i + 1).filter(b => meet(a, b)));
      return [document.documentElement.scrollWidth, spilt.map(cell => cell.title), crossed.length]; }"""
    for variant, ranks in RINGS[:7] + RINGS[-7:]:  # one of each direction
        for step, found in enumerate(frames(page, variant, ranks, look)):
            assert found == [390, [], 0], (variant, ranks, step)


def test_motion_only_where_it_is_welcome(show: Any) -> None:
    moving = "document.getAnimations().length"
    for wish, expected in (("no-preference", True), ("reduce", False)):
        page = show(RingStepper(4), reduced_motion=wish).page
        page.get_by_role("button", name="One step forward").click()
        assert bool(page.evaluate(moving)) is expected


def test_paper_has_no_controls_and_keeps_the_picture(show: Any) -> None:
    page = show(RingStepper(4, step=3, caption="What to see.")).page
    page.emulate_media(media="print")
    assert not any(box.is_visible() for box in page.locator("button, input, select").all())
    assert page.locator(".ddp-ring").is_visible() and page.get_by_text("What to see.").is_visible()


def test_without_scripts_the_still_and_the_words_remain(show: Any) -> None:
    page = show(RingStepper(4, step=3), java_script_enabled=False).page
    still = page.locator("img.ddp-still")
    assert still.is_visible()
    assert "GPU0: A1+D1, A2, SUM3, A4+C4+D4" in still.get_attribute("alt")


def test_dark_pages_colour_it(show: Any) -> None:
    head = "<style>body { color: #ced6dd; background: #14181e } :root { --pst-color-background: #14181e }</style>"
    page = show(RingStepper(4), head=head).page
    colours = page.evaluate(
        """['.ddp-ring text', '.ddp-cell', 'button', '.ddp-ring .ddp-box'].map(q => {
             const look = getComputedStyle(document.querySelector(q));
             return q.endsWith('box') || q.endsWith('text') ? look.fill : look.color; })"""
    )
    assert colours == ["rgb(206, 214, 221)"] * 3 + ["rgb(20, 24, 30)"]


def test_a_screen_reader_gets_the_table_and_what_changed(show: Any) -> None:
    page = show(RingStepper(4)).page
    spoken = page.locator("[aria-live=polite]")
    assert spoken.text_content() == ""  # nothing is read aloud before the reader does something
    go(page, 3)
    assert "GPU0 owns SUM3" in spoken.text_content() and "B1 and C1 are missing" in spoken.text_content()
    table = page.get_by_role("table").aria_snapshot()
    assert 'rowheader "GPU0 A 76.8 MB"' in table
    assert 'cell "A1+D1 (not the full sum that the article shows)"' in table
    assert 'cell "SUM3 (added in this step, owned)"' in table


def test_controls_have_names_and_keep_their_keys(show: Any) -> None:
    page = show(RingStepper(4)).page
    controls = page.locator("button, input, select")
    assert controls.count() == 10
    for control in controls.all():
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
        assert control.evaluate("e => (e.ariaLabel || e.textContent || '').trim() || e.labels?.[0]?.textContent")
