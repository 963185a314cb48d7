import functools

import pytest

from pictures import write_tree


@pytest.fixture
def check(metabridge):
    """Run `metabridge data check` and return its exit status, standard output and standard error."""
    return functools.partial(metabridge, "data", "check")


@pytest.fixture
def root(tmp_path):
    return write_tree(tmp_path / "data", {"train/cat": 4, "train/dog": 5, "test/elm": 4, "test/[oak]": 4})


TASKS = ("--ways", 2, "--shots", 1, "--queries", 3)


def test_the_exit_status_is_0_without_problems(check, root):
    status, printed, errors = check(root, *TASKS)
    assert (status, errors) == (0, "")
    first, *_, last = printed.splitlines()
    assert first == "folder: folders of images, split into train, test"
    assert last == "No problems found."
    assert "2-way 1-shot tasks" in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    # split, classes, images, images of the smallest, median and largest class, and whether tasks can be sampled
    assert rows == [["train", "2", "9", "4", "4.5", "5", "yes"], ["test", "2", "8", "4", "4", "4", "yes"]]
    assert "modes: RGB (17)\nsizes: 8×8 (17)\n" in printed


def test_the_exit_status_is_1_with_problems_and_2_if_strict(check, root):
    (root / "train" / "cat" / "bad.png").write_bytes(b"no image")
    (root / "test" / "yeti").mkdir()
    (root / "test" / "[oak]" / "copy.png").write_bytes((root / "train" / "dog" / "0.png").read_bytes())
    status, printed, _ = check(root, *TASKS)
    assert status == 1
    assert printed.splitlines()[-4:] == [
        "unreadable: train/cat/bad.png (it is not an image that Pillow reads)",
        "duplicate in train (train/dog/0.png) and test (test/[oak]/copy.png)",
        "empty class: yeti",
        "Problems found; see above.",
    ]
    assert check(root, *TASKS, "--strict")[0] == 2


def test_impossible_tasks_are_reported_with_a_reason(check, root):
    status, printed, _ = check(root, "--ways", 3, "--queries", 1)
    assert status == 1
    assert "train: 3 ways need 3 classes, but there are 2: use fewer ways, or add more classes." in printed


def test_a_small_validation_split_is_not_a_problem(check, tmp_path):
    classes = {"train": 3, "validation": 2, "test": 3}
    root = write_tree(tmp_path, {f"{split}/{split}{index}": 4 for split, n in classes.items() for index in range(n)})
    status, printed, _ = check(root, "--ways", 3, "--shots", 1, "--queries", 3)
    assert status == 0
    assert "validation: 2 classes, so validation tasks will have 2 ways.\nNo problems found." in printed


def test_the_default_tasks_are_those_of_evaluate(check, tmp_path):
    root = write_tree(tmp_path, {f"{split}/{split}{index}": 17 for split in ("train", "test") for index in range(5)})
    status, printed, _ = check(root)
    assert status == 1
    assert "test: 5-shot tasks with 15 queries need 20 images per class" in printed


def test_the_format_can_be_specified_by_a_prefix_or_an_option(check, root):
    expected = check(root, *TASKS)
    assert check(f"folder:{root}", *TASKS) == check(root, *TASKS, "--format", "folder") == expected
    status, _, errors = check(root, "--format", "png")
    assert (status, errors[:60]) == (2, "metabridge data check: --format is 'png', but must be one of")


def test_many_sizes_are_summarized_as_a_range(check, root):
    from PIL import Image

    for width, height in [(9, 20), (30, 5), (12, 12)]:
        Image.new("RGB", (width, height), (width, height, 0)).save(root / "train" / "dog" / f"{width}.png")
    assert "sizes: 4 different sizes, widths 8 to 30, heights 5 to 20" in check(root, *TASKS)[1]


def test_a_missing_path_prints_one_sentence_and_exits_with_status_2(check, tmp_path):
    assert check(tmp_path / "nowhere") == (
        2,
        "",
        f"metabridge data check: {tmp_path / 'nowhere'} does not exist. Check the path.\n",
    )


def test_the_help_explains_the_exit_status(check):
    status, printed, _ = check("--help")
    assert status == 0
    text = " ".join(printed.split())
    assert "The exit status is 0 if there are no problems, 1 if there are problems (2 with --strict)," in text
    assert "Example: metabridge data check photos" in text


def test_data_without_a_command_lists_the_commands(metabridge):
    status, printed, _ = metabridge("data")
    assert status == 0
    assert "check" in printed
