import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages, check_labels, check_shape, from_arrays, from_pixels, to_pixels

LABELS = [0, 1, 0, 1]


def images(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


def test_pixels_span_minus_one_to_one_and_back():
    levels = torch.arange(256, dtype=torch.uint8)
    assert to_pixels(levels).dtype == torch.float32
    assert (to_pixels(levels).min(), to_pixels(levels).max()) == (-1, 1)
    assert torch.equal(from_pixels(to_pixels(levels)), levels)


def test_from_pixels_rounds_to_nearest_and_clamps():
    assert from_pixels(torch.tensor([-3.0, 3.0, 0.6 / 127.5 - 1, 0.4 / 127.5 - 1])).tolist() == [0, 255, 1, 0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 8, 9), (1, 8, 9)),
        ((4, 8, 9, 1), (1, 8, 9)),
        ((4, 8, 9, 3), (3, 8, 9)),
        ((4, 1, 8, 9), (1, 8, 9)),
        ((4, 3, 8, 9), (3, 8, 9)),
        ((4, 64, 64), (1, 64, 64)),
    ],
)
def test_layouts(shape, expected):
    given_images = images(*shape)
    data = from_arrays(given_images, LABELS)
    assert data.shape == expected
    channels_last = shape[-1] in (1, 3) and len(shape) == 4
    wanted = np.moveaxis(given_images, 3, 1) if channels_last else given_images.reshape(4, *expected)
    np.testing.assert_array_equal(data.images.numpy(), wanted)


@given(hnp.arrays(np.uint8, (4, 8, 8)))
def test_every_dtype_gives_the_same_levels(levels):
    expected = from_arrays(levels, LABELS).images
    for same in (
        levels.astype(np.int32),
        levels / 255.0,
        (levels / 255.0).astype(np.float32),
        torch.from_numpy(levels),
    ):
        assert torch.equal(from_arrays(same, LABELS).images, expected)
    assert torch.equal(from_arrays(levels.tolist(), torch.tensor(LABELS)).images, expected)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30))
def test_labels_are_kept_exactly_when_every_class_is_present(labels):
    if set(labels) == set(range(max(labels) + 1)):
        index, names = check_labels(np.array(labels, np.float32), None, "labels")
        assert index.dtype == np.int64
        assert index.tolist() == labels
        assert names == tuple(str(k) for k in range(max(labels) + 1))
    else:
        with pytest.raises(UserError):
            check_labels(np.array(labels), None, "labels")


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_copied_without_a_warning():
    levels = images(4, 8, 8)
    levels.flags.writeable = False
    assert torch.equal(from_arrays(levels, LABELS).images[:, 0], torch.from_numpy(levels.copy()))


def test_where_begins_every_message():
    for bad_images, bad_labels in ((images(4, 7, 7), LABELS), (images(4, 8, 8), [0, 1]), (images(1, 8, 8), [0])):
        with pytest.raises(UserError, match=r"^set\.npz: "):
            from_arrays(bad_images, bad_labels, where="set.npz")
        with pytest.raises(UserError, match=r"^(images|labels): "):
            from_arrays(bad_images, bad_labels)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (images(4, 8), r"images: expected shape \(N, H, W\), .* got \(4, 8\)"),
        (images(4, 8, 8, 4), r"images: expected shape .* got \(4, 8, 8, 4\)"),
        (images(4, 2, 8, 8), r"images: expected shape .* got \(4, 2, 8, 8\)"),
        (7, r"images: expected shape .* got \(\)"),
        ([[1, 2], [3]], "images: cannot be read as one rectangular array of numbers"),
        (torch.zeros(4, 8, 8, dtype=torch.bfloat16), "images: cannot be read as one rectangular array of numbers"),
        (images(4, 7, 8), "images: images are 7x8; each side must have 8 to 64 pixels, resize"),
        (images(4, 8, 65), "images are 8x65"),
        (images(4, 8, 8, dtype=bool), "dtype bool is not supported"),
        (images(4, 8, 8, dtype=complex), "dtype complex128 is not supported"),
        (images(4, 8, 8, dtype="m8[s]"), r"dtype timedelta64\[s\] is not supported"),
        (images(4, 8, 8).astype(str), "dtype <U3 is not supported"),
        (images(4, 8, 8) * 256.0, r"float pixels must lie in \[0, 1\], found 0\.\.65280; rescale"),
        (images(4, 8, 8, dtype=int) - 300, r"integer pixels must be 0\.\.255, found -300\.\.-4"),
        (np.full((4, 8, 8), np.nan), "some pixels are NaN or infinite; remove or repair"),
        (np.full((4, 8, 8), np.inf), "some pixels are NaN or infinite"),
    ],
)
def test_bad_images(bad, message):
    with pytest.raises(UserError, match=message):
        from_arrays(bad, LABELS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 1, 0], r"labels: expected one label for each of the 4 images, got shape \(3,\)"),
        ([[0], [1], [0], [1]], r"expected one label for each of the 4 images, got shape \(4, 1\)"),
        ([[0, 1], [0]], "labels: cannot be read as one rectangular array"),
        (["a", "b", "a", "b"], "labels must be integers 0..L-1, got dtype <U1; encode them first"),
        ([True, False, True, False], "labels must be integers 0..L-1, got dtype bool"),
        (np.zeros(4, "m8[s]"), "labels must be integers"),
        ([0, 1, 0, 1j], "labels must be integers"),
        ([0, 1, 0, 0.5], "labels must be whole numbers"),
        ([0, 1, 0, np.nan], "labels must be whole numbers"),
        ([0, 1, 0, -1], "label -1 is out of range"),
        ([0, 1, 0, 1e300], r"label 1e\+300 with only 4 records; number the classes 0..L-1"),
        (np.array([0, 1, 0, 2**64 - 1], np.uint64), "label 18446744073709551615 with only 4 records"),
        ([0, 1, 0, 3], "labels are not contiguous, class 2 of 0..3 has no record; renumber"),
    ],
)
def test_bad_labels(bad, message):
    with pytest.raises(UserError, match=message):
        from_arrays(images(4, 8, 8), bad)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("a",), "label 1 is out of range for 1 classes"),
        (("a", "b", "c"), "class 2 of 0..2 has no record"),
        (tuple("abcde"), "class 2 of 0..4 has no record"),
    ],
)
def test_class_names_that_do_not_fit(classes, message):
    with pytest.raises(UserError, match=message):
        from_arrays(images(4, 8, 8), LABELS, classes)


@pytest.mark.parametrize("values", [np.zeros(0, int), np.zeros((4, 1), int), np.array(0)])
def test_check_labels_wants_a_list(values):
    with pytest.raises(UserError, match="here: expected a list with a label for each image, got shape"):
        check_labels(values, None, "here")


def test_one_record_is_too_few():
    with pytest.raises(UserError, match="images: at least two records are needed, got 1"):
        from_arrays(images(1, 8, 8), [0])


def test_check_shape_refuses_other_channels():
    check_shape((1, 8, 64), "here")
    with pytest.raises(UserError, match="here: images have 2 channels"):
        check_shape((2, 8, 8), "here")


def test_repr_shows_no_record():
    data = LabelledImages(torch.full((2, 1, 8, 8), 213, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    assert repr(data) == "LabelledImages(shape=(1, 8, 8), classes=2)"
    assert len(data) == 2
