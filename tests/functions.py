"""JAX's public functions as programs: each on the first operands it takes, its results and their gradient where it has one."""

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import jax.scipy.interpolate
import jax.scipy.optimize
import jax.scipy.sparse.linalg
import jax.scipy.spatial.transform
from jax import lax
from jax.experimental import sparse

KEY = jax.random.key(0)
X = jax.random.uniform(KEY, (8, 6), minval=0.1, maxval=0.9)
SQUARE, VECTOR, WHOLES, TRUTHS = X[:6], X[0], (X * 10).astype(int), X > 0.5
POSITIVE = SQUARE @ SQUARE.T + 4 * jnp.eye(6)
IMAGE = jax.random.normal(KEY, (4, 8, 8, 2))

MODULES = """
    lax lax.linalg numpy numpy.linalg numpy.fft nn nn.initializers image random
    ops scipy.special scipy.linalg scipy.signal scipy.fft scipy.ndimage scipy.integrate scipy.optimize scipy.interpolate
    scipy.spatial.transform scipy.cluster.vq scipy.sparse.linalg scipy.stats scipy.stats.multinomial
    scipy.stats.bernoulli scipy.stats.beta scipy.stats.betabinom scipy.stats.binom scipy.stats.cauchy scipy.stats.chi2
    scipy.stats.dirichlet scipy.stats.expon scipy.stats.gamma scipy.stats.gennorm scipy.stats.geom scipy.stats.gumbel_l
    scipy.stats.gumbel_r scipy.stats.laplace scipy.stats.logistic scipy.stats.multivariate_normal scipy.stats.nbinom
    scipy.stats.norm scipy.stats.pareto scipy.stats.poisson scipy.stats.t scipy.stats.truncnorm scipy.stats.uniform
    scipy.stats.vonmises scipy.stats.wrapcauchy
"""


def names(text: str) -> set[str]:
    """The words of a text, but for what stands in parentheses: the reasons."""
    return set(re.sub(r"\([^)]*\)", "", text).split())


NOT_MEANT = names("""
    axis_size pbroadcast pcast precv psend psum_scatter_start ragged_all_to_all  (inside shard_map)
    after_all create_token  (tokens are not arrays)
    dce_sink empty  (give nothing, or anything)
    mulhi scaled_matmul  (XLA does not compile them for several devices, or not for CPU)
    conv_dimension_numbers conv_general_permutations conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple
    padtype_to_pads reduce_window_shape_tuple einsum_path get_scaled_dot_general_config  (of shapes and parameters alone)
    dtype key_dtype key_impl promote_types result_type get_printoptions printoptions set_printoptions  (give no arrays)
    frombuffer fromfile fromiter fromstring from_dlpack load trim_zeros  (not under jit)
    kaiser  (roots of 1 - 1, which XLA rounds below zero in plain jit, too, once the result is split)
    with_sharding_constraint wrap_key_data  (tested elsewhere)
""")
"""Public functions that are no programs, each line with its reason."""

OPERANDS: list[tuple] = [
    (X,), (X, X), (SQUARE,), (SQUARE, SQUARE), (VECTOR,), (VECTOR, VECTOR), (WHOLES,), (WHOLES, WHOLES), (TRUTHS, X, X), (TRUTHS,),
    (X, X, X), (VECTOR, VECTOR, VECTOR), (X, 1), (X, (1, 0)), (X, WHOLES[:, :1], 1), (SQUARE, SQUARE[:, :2]), ([X, X],), ([X, X], 0),
    (X, (8, 6)), (8,), (KEY, (8, 6)), (KEY,), (KEY, X), (KEY, VECTOR), (KEY, X, X), (WHOLES, X), (VECTOR, X), (VECTOR, WHOLES[0]),
    (X, 0, 2), (WHOLES[:, 0], 6), (WHOLES[0], X, X), (X, X, X, X), (VECTOR, VECTOR, VECTOR, VECTOR), (X.astype(complex),),
    (WHOLES, 6), (X, 0.5), (X, VECTOR), ((8, 6), X[0, 0]), ((8, 6),),
]  # fmt: skip
"""What a function is tried on; numbers and tuples are static."""


def cube_root(x):
    def newton(f, y):
        return lax.fori_loop(0, 20, lambda _, y: y - f(y) / (3 * y**2), y)

    return lax.custom_root(lambda y: y**3 - x, jnp.ones_like(x), newton, lambda g, y: y / g(jnp.ones_like(y)))


rows = lax.ScatterDimensionNumbers((1,), (0,), (0,))
taken = lax.GatherDimensionNumbers((1,), (0,), (0,))

dots = (((1,), (0,)), ((), ()))
images = ("NHWC", "HWIO", "NHWC")
CUBE, SMALL = X.reshape(4, 6, 2), SQUARE / 8


def each(fn, *args, **params):
    """A collective among the rows of an array."""
    return jax.vmap(lambda x: fn(x, "i", *args, **params), axis_name="i")


def mutated(x):
    """A mutable array, written in a loop."""
    total = jax.new_ref(jnp.zeros(6))

    def add(i, _):
        total[...] += jnp.sin(x[i])

    lax.fori_loop(0, 8, add, None)
    return total[...]


@jax.custom_batching.custom_vmap
def doubled(x):
    return x * 2


@doubled.def_vmap
def _(size, batched, x):
    return x + x, batched[0]


INITIALIZERS = """
    glorot_normal glorot_uniform he_normal he_uniform lecun_normal lecun_uniform normal orthogonal truncated_normal uniform
"""

BY_HAND: dict[str, tuple] = {
    "lax.all_gather": (each(lax.all_gather), X),
    "lax.all_to_all": (each(lax.all_to_all, 0, 0), SQUARE),
    "lax.argmax": (lambda x: lax.argmax(x, 1, "int32"), X),
    "lax.argmin": (lambda x: lax.argmin(x, 0, "int32"), X),
    "lax.axis_index": (each(lambda x, i: x * lax.axis_index(i)), X),
    "lax.broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (8, 3, 6), (0, 2)), X),
    "lax.broadcasted_iota": (lambda x: x * lax.broadcasted_iota(x.dtype, x.shape, 1), X),
    "lax.composite": (lax.composite(lambda x: jnp.sin(x) @ x.T, "tests.product"), X),
    "lax.conv_general_dilated": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME", (1, 1), (2, 1), images), IMAGE, IMAGE[:3, :3, :2, :],
    ),
    "lax.conv_with_general_padding": (
        lambda x, w: lax.conv_with_general_padding(x, w, (1, 1), ((1, 1), (0, 2)), (1, 2), (1, 1)), IMAGE, IMAGE[:, :, :3],
    ),
    "lax.convert_element_type": (lambda x: lax.convert_element_type(x, "bfloat16"), X),
    "lax.dot_general": (lambda x, y: lax.dot_general(x, y, dots, preferred_element_type="float32"), X, X.T),
    "lax.dynamic_update_index_in_dim": (lambda x, y, i: lax.dynamic_update_index_in_dim(x, y, i[0], 0), X, VECTOR, WHOLES[0]),
    "lax.dynamic_update_slice_in_dim": (lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i[0], 0), X, X[:2], WHOLES[0]),
    "lax.index_take": (lambda x, i: lax.index_take(x, (i[:, 0], i[:, 1] % 6), (0, 1)), X, WHOLES),
    "lax.iota": (lambda x: x * lax.iota(x.dtype, 6), X),
    "lax.ppermute": (each(lax.ppermute, [(i, (i + 3) % 8) for i in range(8)]), X),
    "lax.pshuffle": (each(lax.pshuffle, [(i + 3) % 8 for i in range(8)]), X),
    "lax.psum_scatter": (each(lax.psum_scatter), SQUARE),
    "lax.pswapaxes": (each(lax.pswapaxes, 0), SQUARE),
    "lax.ragged_dot_general": (
        lambda x, w: lax.ragged_dot_general(x, w, jnp.array([5, 3]), lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])),
        X, X[:4].reshape(2, 6, 2),
    ),
    "lax.reduce_and": (lambda x: lax.reduce_and(x, (0,)), TRUTHS),
    "lax.reduce_or": (lambda x: lax.reduce_or(x, (0,)), TRUTHS),
    "lax.reduce_xor": (lambda x: lax.reduce_xor(x, (0,)), WHOLES),
    "lax.scatter_min": (lambda x, i, u: lax.scatter_min(x, i, u, rows), X, WHOLES[:, :1], X / 2),
    "lax.linalg.ormqr": (lambda x, y: lax.linalg.ormqr(x, x[0], y), SQUARE, SQUARE),
    "numpy.apply_over_axes": (lambda x: jnp.apply_over_axes(jnp.sum, x, (0, 1)), X),
    "numpy.argwhere": (lambda x: jnp.argwhere(x, size=5), TRUTHS),
    "numpy.astype": (lambda x: jnp.astype(x, "float16"), X),
    "numpy.compress": (lambda x, m: jnp.compress(m[:, 0], x, axis=0, size=4), X, TRUTHS),
    "numpy.dsplit": (lambda x: jnp.dsplit(x, 2), CUBE),
    "numpy.extract": (lambda x, m: jnp.extract(m, x, size=4), X, TRUTHS),
    "numpy.flatnonzero": (lambda x: jnp.flatnonzero(x, size=5), TRUTHS),
    "numpy.fromfunction": (lambda x: x * jnp.fromfunction(lambda i, j: i + j, (8, 6)), X),
    "numpy.frompyfunc": (lambda x: jnp.frompyfunc(lambda a, b: a * b, 2, 1, identity=1).accumulate(x), X),
    "numpy.intersect1d": (lambda x, y: jnp.intersect1d(x, y, size=6), WHOLES[0], WHOLES[1]),
    "numpy.linalg.cross": (jnp.linalg.cross, X[:, :3], X[:, 3:]),
    "numpy.mask_indices": (lambda x: x[jnp.mask_indices(6, jnp.triu, size=9)], SQUARE),
    "numpy.moveaxis": (lambda x: jnp.moveaxis(x, 0, 2), CUBE),
    "numpy.ravel_multi_index": (lambda i: jnp.ravel_multi_index((i[0], i[1]), (8, 6), mode="clip"), WHOLES),
    "numpy.setdiff1d": (lambda x, y: jnp.setdiff1d(x, y, size=6), WHOLES[0], WHOLES[1]),
    "numpy.setxor1d": (lambda x, y: jnp.setxor1d(x, y, size=6), WHOLES[0], WHOLES[1]),
    "numpy.swapaxes": (lambda x: jnp.swapaxes(x, 0, 2), CUBE),
    "numpy.unique_all": (lambda x: tuple(jnp.unique_all(x, size=6)), WHOLES),
    "numpy.unique_counts": (lambda x: tuple(jnp.unique_counts(x, size=6)), WHOLES),
    "numpy.unique_inverse": (lambda x: tuple(jnp.unique_inverse(x, size=6)), WHOLES),
    "numpy.unique_values": (lambda x: jnp.unique_values(x, size=6), WHOLES),
    "nn.scaled_dot_general": (lambda x, y: jax.nn.scaled_dot_general(x, y, (((2,), (2,)), ((0,), (0,)))), CUBE, CUBE),
    **{
        f"nn.initializers.{name}": (lambda key, make=make, shape=shape: make(key, shape), KEY)
        for name, make, shape in [
            *((name, getattr(jax.nn.initializers, name)(), (8, 6)) for name in INITIALIZERS.split()),
            ("constant", jax.nn.initializers.constant(2.0), (8, 6)),
            ("delta_orthogonal", jax.nn.initializers.delta_orthogonal(), (3, 3, 2, 4)),
            ("variance_scaling", jax.nn.initializers.variance_scaling(2.0, "fan_in", "normal"), (8, 6)),
        ]
    },
    **{
        f"ops.{join.__name__}": (lambda x, i, join=join: join(x, i[:, 0], 10), X, WHOLES)
        for join in (jax.ops.segment_sum, jax.ops.segment_prod, jax.ops.segment_max, jax.ops.segment_min)
    },
    "scipy.interpolate": (
        lambda x, at: jax.scipy.interpolate.RegularGridInterpolator((jnp.arange(8.0), jnp.arange(6.0)), x)(at[:, :2] * 5), X, X,
    ),
    "scipy.linalg.funm": (lambda x: jax.scipy.linalg.funm(x, jnp.exp), SMALL),
    "scipy.linalg.leslie": (lambda x: jax.scipy.linalg.leslie(x, x[1:]), VECTOR),
    "scipy.linalg.solve_sylvester": (jax.scipy.linalg.solve_sylvester, SQUARE, POSITIVE, X[:6]),
    "scipy.optimize.minimize": (lambda x: jax.scipy.optimize.minimize(lambda y: ((y - x) ** 4).sum(), x * 2, method="BFGS").x, VECTOR),
    "scipy.spatial.transform": (lambda x: jax.scipy.spatial.transform.Rotation.from_rotvec(x[:, :3]).apply(x[:, 3:]), X),
    "scipy.special.sph_harm_y": (
        lambda n, x: jax.scipy.special.sph_harm_y(n[0], n[0] // 2, x[0], x[1], n_max=10), WHOLES, X,
    ),
    "custom_batching.custom_vmap": (doubled, X),
    "custom_derivatives.linear_call": (
        lambda x: jax.custom_derivatives.linear_call(lambda r, x: x * r, lambda r, y: y * r, x[0], x).sum(), X,
    ),
    "new_ref": (mutated, X),
    "lax.approx_max_k": (lambda x: lax.approx_max_k(x, 3, reduction_dimension=0), X),
    "lax.associative_scan": (lambda x: lax.associative_scan(jnp.add, x), X),
    "lax.associative_scan of pairs": (lambda x, y: lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, y)), X, X),
    "lax.bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
    "lax.cond": (lambda x: lax.cond(x[0, 0] > 0.5, jnp.sin, jnp.cos, x), X),
    "lax.conv": (lambda x: lax.conv(x, jnp.ones((4, 8, 3, 3)), (1, 1), "SAME"), IMAGE),
    "lax.conv_general_dilated_local": (
        lambda x, w: lax.conv_general_dilated_local(x, w, (1,), "SAME", (3,)), X[None], jax.random.normal(KEY, (4, 24, 6)),
    ),
    "lax.conv_general_dilated_patches": (lambda x: lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "SAME"), IMAGE),
    "lax.conv_transpose": (lambda x: lax.conv_transpose(x, jnp.ones((3, 3, 2, 4)), (2, 2), "SAME"), IMAGE),
    "lax.custom_linear_solve": (
        lambda a, b: lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True), POSITIVE, VECTOR,
    ),
    "lax.custom_root": (cube_root, VECTOR),
    "lax.dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (4, 2)), X, WHOLES[0]),
    "lax.dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i[0], i[1])), X, X[:4, :2], WHOLES[0]),
    "lax.fori_loop": (lambda x: lax.fori_loop(0, 4, lambda i, y: jnp.sin(y) + i, x), X),
    "lax.gather": (lambda x, i: lax.gather(x, i, taken, (1, 6)), X, WHOLES[:, :1]),
    "lax.map": (lambda x: lax.map(jnp.sort, x), X),
    "lax.pad": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (-1, 0, 1))), X),
    "lax.platform_dependent": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X),
    "lax.pmax and pmin": (jax.vmap(lambda x: x / (lax.pmax(x, "i") - lax.pmin(x, "i") + 1), axis_name="i"), X),
    "lax.pmean": (jax.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i"), X),
    "lax.psum": (jax.vmap(lambda x, y: x / lax.psum(y, "i"), axis_name="i"), X, X),
    "lax.ragged_dot": (lambda x, w: lax.ragged_dot(x, w, jnp.array([5, 3])), X, X[:4].reshape(2, 6, 2)),
    "lax.reduce": (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b, (0,)), X),
    "lax.reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), X),
    "lax.reduce_window": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), IMAGE),
    "lax.reshape": (lambda x: lax.reshape(x, (2, 6, 4), (1, 0)), X),
    "lax.rng_bit_generator": (lambda key: lax.rng_bit_generator(key, (8, 6)), jnp.arange(4, dtype="uint32")),
    "lax.rng_uniform": (lambda x: x + 0 * lax.rng_uniform(0.0, 1.0, (8, 6)), X),
    "lax.scan": (lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x, reverse=True, unroll=2), X),
    "lax.scatter": (lambda x, i, u: lax.scatter(x, i, u, rows), X, jnp.arange(3)[:, None], X[:3]),
    "lax.scatter_add": (lambda x, i, u: lax.scatter_add(x, i, u, rows), X, WHOLES[:, :1], X),
    "lax.scatter_apply": (lambda x, i: lax.scatter_apply(x, i, jnp.sin, rows, update_shape=(3, 6)), X, jnp.arange(3)[:, None]),
    "lax.scatter_max": (lambda x, i, u: lax.scatter_max(x, i, u, rows), X, WHOLES[:, :1], X * 2),
    "lax.scatter_mul": (lambda x, i, u: lax.scatter_mul(x, i, u, rows), X, WHOLES[:, :1], X),
    "lax.scatter_sub": (lambda x, i, u: lax.scatter_sub(x, i, u, rows), X, WHOLES[:, :1], X),
    "lax.slice": (lambda x: lax.slice(x, (1, 0), (5, 6), (2, 3)), X),
    "lax.split": (lambda x: lax.split(x, (2, 4)), VECTOR),
    "lax.squeeze": (lambda x: lax.squeeze(x, (1,)), X[:, None]),
    "lax.switch": (lambda x, i: lax.switch(i[0, 0] % 3, [jnp.sin, jnp.cos, lambda x: x @ x.T @ x], x), X, WHOLES),
    "lax.while_loop": (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)), X),
    "lax.fft": (lambda x: lax.fft(x.astype("complex64"), "FFT", (6,)), X),
    "lax.linalg.cholesky_update": (lax.linalg.cholesky_update, jnp.linalg.cholesky(POSITIVE).T, VECTOR),
    "lax.linalg.tridiagonal_solve": (lambda x, b: lax.linalg.tridiagonal_solve(x / 4, x + 2, x / 4, b), X, jnp.stack([X] * 2, -1)),
    "numpy.apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.cumsum, 0, x), X),
    "numpy.bincount": (lambda x: jnp.bincount(x[:, 0], length=10), WHOLES),
    "numpy.choose": (lambda i, x: jnp.choose(i, [x, x + 1, x + 2], mode="clip"), WHOLES, X),
    "numpy.cross": (jnp.cross, X[:, :3], X[:, 3:]),
    "numpy.fill_diagonal": (lambda x: jnp.fill_diagonal(x, 2.0, inplace=False), X),
    "numpy.nonzero": (lambda x: jnp.nonzero(x, size=5), TRUTHS),
    "numpy.place": (lambda x, m: jnp.place(x, m, jnp.arange(3.0), inplace=False), X, TRUTHS),
    "numpy.polyfit": (lambda x, y: jnp.polyfit(x, y, 2), VECTOR, X[:6, :2]),
    "numpy.put": (lambda x, i: jnp.put(x, i[:, 0], 2.0, inplace=False), X, WHOLES),
    "numpy.put_along_axis": (lambda x, i: jnp.put_along_axis(x, i[:, :1] % 6, 2.0, 1, inplace=False), X, WHOLES),
    "numpy.unique": (lambda x: jnp.unique(x, size=6, return_index=True, return_counts=True), WHOLES),
    "numpy.union1d": (lambda x, y: jnp.union1d(x, y, size=8), WHOLES[0], WHOLES[1]),
    "numpy.unpackbits": (lambda x: jnp.unpackbits(x.astype("uint8"), axis=1), WHOLES),
    "numpy.vectorize": (jnp.vectorize(lambda a, b: a @ b, signature="(n),(n)->()"), X, X),
    "numpy.linalg.matrix_power": (lambda x: jnp.linalg.matrix_power(x, 3), SQUARE),
    "numpy.linalg.multi_dot": (lambda x: jnp.linalg.multi_dot([x, x.T, x]), X),
    "numpy.linalg.tensorsolve": (lambda a, b: jnp.linalg.tensorsolve(a.reshape(2, 3, 6), b), POSITIVE, X[0].reshape(2, 3)),
    "nn.dot_product_attention, causal": (lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="xla"), IMAGE),
    "image.resize": (lambda x: jax.image.resize(x, (4, 16, 4, 2), "bilinear"), IMAGE),
    "image.scale_and_translate": (lambda x: jax.image.scale_and_translate(x, (12, 6), (0, 1), VECTOR[:2] + 1, VECTOR[:2], "cubic"), X),
    "scipy.special.bessel_jn": (lambda x: jax.scipy.special.bessel_jn(x, v=3), VECTOR),
    "scipy.linalg.cho_solve": (lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b), POSITIVE, X.T),
    "scipy.linalg.eigh_tridiagonal": (lambda d, e: jax.scipy.linalg.eigh_tridiagonal(d, e, eigvals_only=True), VECTOR, VECTOR[1:]),
    "scipy.linalg.lu_solve": (lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), b), POSITIVE, X.T),
    "scipy.ndimage.map_coordinates": (lambda x, at: jax.scipy.ndimage.map_coordinates(x, [at * 7, at * 5], 1), X, X),
    **{
        f"scipy.sparse.linalg.{solve.__name__}": (lambda a, b, solve=solve: solve(a, b, maxiter=4)[0], POSITIVE, VECTOR)
        for solve in (jax.scipy.sparse.linalg.cg, jax.scipy.sparse.linalg.bicgstab, jax.scipy.sparse.linalg.gmres)
    },
    **{
        f"scipy.stats.multinomial.{of.__name__}": (lambda x, p, of=of: of(x, x.sum(), p / p.sum()), WHOLES[0], VECTOR)
        for of in (jax.scipy.stats.multinomial.pmf, jax.scipy.stats.multinomial.logpmf)
    },
    "random.ball": (lambda key: jax.random.ball(key, 3, shape=(8,)), KEY),
    "random.fold_in": (lambda key: jax.random.bits(jax.random.fold_in(key, 3), (8,)), KEY),
    "random.generalized_normal": (lambda key: jax.random.generalized_normal(key, 1.5, (8, 6)), KEY),
    "random.multinomial": (lambda key, p: jax.random.multinomial(key, 10.0, p), KEY, VECTOR),
    "random.multivariate_normal": (lambda key, m, c: jax.random.multivariate_normal(key, m, c, (8,)), KEY, VECTOR, POSITIVE),
    "random.orthogonal": (lambda key: jnp.abs(jax.random.orthogonal(key, 4, (8,))), KEY),
    "random.randint": (lambda key: jax.random.randint(key, (8, 6), 0, 10), KEY),
    "random.triangular": (lambda key: jax.random.triangular(key, 0.0, 0.5, 1.0, (8, 6)), KEY),
    "random with rbg keys": (
        lambda k: jax.random.normal(jax.random.wrap_key_data(k, impl="rbg"), (8, 6)), jnp.arange(4, dtype="uint32"),
    ),
}  # fmt: skip
"""Functions that take what fits nothing above."""

DENSE = jnp.where(X > 0.6, X, 0.0)


def sparse_functions() -> Iterator[tuple[str, Callable, tuple]]:
    """What BCOO arrays are made of and do, and the older forms."""
    bcoo, other = sparse.BCOO.fromdense(DENSE, nse=24), sparse.BCOO.fromdense(DENSE.T, nse=24)
    batched = sparse.BCOO.fromdense(jnp.stack([DENSE] * 4), n_batch=1, nse=24)
    inner, each = (((1,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
    for name, fn, args in [
        ("bcoo matvec", lambda m, v: m @ v, (bcoo, VECTOR)),
        ("bcoo matmul", lambda m, x: m @ x, (bcoo, X.T)),
        ("bcoo from the left", lambda m, x: x @ m, (bcoo, X.T)),
        ("bcoo batched", lambda m, x: sparse.bcoo_dot_general(m, x, dimension_numbers=each), (batched, jnp.stack([X.T] * 4))),
        ("bcoo sparse product", lambda m, n: (m @ n).todense(), (bcoo, other)),
        ("bcoo elementwise", lambda m, n: (m * n.T + m).todense(), (bcoo, other)),
        ("bcoo times dense", lambda m, x: (m * x).todense(), (bcoo, X)),
        ("bcoo sums", lambda m: m.sum(0).todense() + m.T.sum(1).todense(), (bcoo,)),
        ("bcoo to and fro", lambda x: sparse.BCOO.fromdense(x, nse=24).sort_indices().sum_duplicates(nse=24).todense(), (DENSE,)),
        ("bcoo slices", lambda m: (m[2:6, 1:].todense(), m.reshape(6, 8).todense()), (bcoo,)),
        ("bcoo sampled", lambda x, y, m: sparse.bcoo_dot_general_sampled(x, y, m.indices, dimension_numbers=inner), (X, X.T @ X, bcoo)),
        ("bcoo extracted", lambda x, m: sparse.bcoo_extract(m, x).todense(), (X, bcoo)),
        ("bcoo dense again", lambda m: sparse.todense(m) * 2, (bcoo,)),
        ("bcsr matmul", lambda m, x: (m @ x, m.todense()), (sparse.BCSR.fromdense(DENSE, nse=24), X.T)),
        ("bcsr to and fro", lambda x: sparse.BCSR.fromdense(x, nse=24).todense(), (DENSE,)),
        ("coo matmul", lambda m, x: (m @ x, m @ x[:, 0], m.todense()), (sparse.COO.fromdense(DENSE, nse=24), X.T)),
        ("csr matmul", lambda m, x: (m @ x, m @ x[:, 0], m.todense()), (sparse.CSR.fromdense(DENSE, nse=24), X.T)),
        ("sparsified", sparse.sparsify(lambda m, x: jnp.tanh((m @ x).sum(0)) + (2 * m).sum()), (bcoo, X.T)),
    ]:  # fmt: skip
        leaves, tree = jax.tree.flatten(args)

        def run(*leaves, fn=fn, tree=tree):
            return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

        yield f"sparse {name}", with_gradient(run, *leaves), tuple(leaves)


def functions(module) -> Iterator[tuple[str, Callable]]:
    for name, fn in vars(module).items():
        if callable(fn) and not name.startswith("_") and not inspect.isclass(fn):
            yield name, fn


def loss_of(fn):
    """Sum of squares of all floating results."""
    return lambda *args: sum(jnp.sum(y**2) for y in jax.tree.leaves(fn(*args)) if jnp.issubdtype(y.dtype, jnp.floating))


def with_gradient(fn: Callable, *args) -> Callable:
    """The function, and the gradient of its loss where it has one."""
    floats = tuple(i for i, a in enumerate(args) if a.dtype == X.dtype)
    both = lambda *xs: (fn(*xs), jax.grad(loss_of(fn), floats)(*xs))  # noqa: E731
    return both if floats and shapes(both, *args) is not None else fn


def shapes(fn: Callable, *args):
    """Of the results; None where the function does not take these operands."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return jax.eval_shape(fn, *args)
    except Exception:
        return None


def left_out(found: set[str]) -> list[str]:
    """Public functions of jax that are neither among these programs, under any of their names, nor said not to be meant."""
    public: dict = {}
    for module in MODULES.split():
        for name, fn in functions(importlib.import_module(f"jax.{module}")):
            if str(getattr(fn, "__module__", "")).startswith("jax"):
                public.setdefault(fn, []).append(f"{module}.{name}")
    return [same[0] for same in public.values() if found.isdisjoint(same) and NOT_MEANT.isdisjoint(x.split(".")[-1] for x in same)]


def jax_functions() -> Iterator[tuple[str, Callable, tuple]]:
    seen = set()
    for module in MODULES.split():
        for name, fn in functions(importlib.import_module(f"jax.{module}")):
            theirs = str(getattr(fn, "__module__", "")).startswith("jax")
            if fn in seen or not theirs or name in NOT_MEANT or f"{module}.{name}" in BY_HAND:
                continue
            seen.add(fn)
            for operands in OPERANDS:
                leaves, tree = jax.tree.flatten(operands)
                dynamic = tuple(x for x in leaves if isinstance(x, jax.Array))

                def call(*xs, fn=fn, leaves=leaves, tree=tree):
                    given = iter(xs)
                    return fn(*tree.unflatten([next(given) if isinstance(x, jax.Array) else x for x in leaves]))

                made = jax.tree.leaves(shapes(call, *dynamic))
                if made and all(hasattr(x, "dtype") for x in made):
                    yield f"{module}.{name}", with_gradient(call, *dynamic), dynamic
                    break
    for name, (fn, *operands) in BY_HAND.items():
        yield name, with_gradient(fn, *operands), tuple(operands)
