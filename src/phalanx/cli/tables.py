"""`phalanx tables`: the tables of a textbook, for any model, cluster and strategy, or for a number of parameters; the
mesh; and what can be named: the models and clusters that ship."""

from phalanx.cli.command import command
from phalanx.cli.forms import forms, has_option
from phalanx.cli.mesh import mesh
from phalanx.cli.options import StepQuery
from phalanx.cli.output import Printed, Saved

OPTIONS = """
policy --bytes-per-parameter: Bytes of state per parameter: 16 (weight 2, gradient 2, master and moments 12), 12, 18
    or 20.
--card: Memory of a GPU in GB.
--params 25M: Number of parameters.
"""
_STEP_OPTIONS = ("--strategy", "--cluster", "--gpus", "--batch", "--stack", "--precision", "--options")


@command
def memory_of_strategy(query: StepQuery, output: Saved) -> None:
    """Tabulate what occupies the memory of a strategy's fullest rank, as `predict` and `explain` have it."""
    from phalanx.answers.tables import memory

    output.show(memory(query), subject="memory")


@command
def memory_of_model(
    model: str, output: Saved, micro_batch: int = 1, seq: int | None = None, policy: int = 16, card: float = 80.0
) -> None:
    """Tabulate the state of a --model by level of ZeRO, and its activations by recomputation, tp and sp.

    --micro-batch: Sequences per micro-batch.
    """
    from phalanx.answers.tables import model_memory

    output.show(model_memory(model, micro_batch, seq, policy, card), subject="memory")


@command
def memory_of_params(params: str, output: Saved, policy: int = 16, card: float = 80.0) -> None:
    """Tabulate the state of a number of --params by level of ZeRO."""
    from phalanx.answers.tables import state_memory

    output.show(state_memory(params, policy, card), subject="memory")


@command
def comm_of_strategy(query: StepQuery, output: Saved) -> None:
    """Tabulate what each mesh axis of a strategy sends: payload, bytes by tier, time, and whether it is hidden.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; or an observed.json and --cluster.
    """
    from phalanx.answers import observed
    from phalanx.answers.tables import traffic

    if (seen := observed.observation_of(query)) is not None:
        output.show(observed.price(seen, query), collectives=True)
    else:
        output.show(traffic(query), subject="comm")


@command
def comm_of_params(
    params: str, output: Saved, rate: float = 25.0, compute: float | None = None, top_k: float | None = None
) -> None:
    """Tabulate what an all-reduce of the gradients of a number of --params sends and takes, by number of ranks.

    --rate: Bandwidth of a rank in one direction, in GB/s.
    --compute SECONDS: Compare with this many seconds of computing a step.
    --top-k SHARE: Send the largest share of gradients alone.
    """
    from phalanx.answers.tables import gradient_traffic

    output.show(gradient_traffic(params, rate, compute, top_k), subject="comm")


@command
def roofline_of_chips(output: Saved) -> None:
    """Tabulate the FLOP per byte at which memory and links keep up with each known chip."""
    from phalanx.answers.tables import ridge_points

    output.show(ridge_points(), subject="roofline")


@command
def roofline_of_strategy(query: StepQuery, output: Saved) -> None:
    """Tabulate ridge points, and the intensity of each operator of a strategy in training and in decoding.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    from phalanx.answers.tables import roofline

    output.show(roofline(query), subject="roofline")


@command
def roofline_of_params(params: str, output: Saved, cluster: str = "dgx-h100", seq: int = 2048) -> None:
    """Tabulate the FLOP per byte sent by batch size, over the links inside a node and those between nodes."""
    from phalanx.answers.tables import communication_intensity

    output.show(communication_intensity(params, cluster, seq), subject="roofline")


@command
def scaling_of_model(
    model: str,
    gpus: str,
    batch: int,
    seq: int,
    output: Saved,
    cluster: str = "dgx-h100",
    devices: str | None = None,
    stack: str = "megatron-core",
) -> None:
    """Tabulate strong and weak scaling, efficiency by batch size, and the effect of the network and the device.

    --gpus N|N,N,...: GPUs; of one number also four halvings of it.
    --devices v100,a100,h100: Also compare these devices, on the largest number of GPUs.
    --stack STACK: Software stack whose step is priced.
    """
    from phalanx.answers.tables import scaling as scaling_tables

    output.show(scaling_tables(model, cluster, gpus, batch, seq, stack, devices), subject="scaling")


@command
def scaling_of_params(params: str, tokens: str, output: Saved, rate: float = 150.0, gpus: str = "1,1024") -> None:
    """Tabulate the days to train a number of --params by number of GPUs, by 6 N FLOP a token.

    --tokens 300B: Tokens to train on.
    rate --tflops: TFLOP/s that each GPU reaches.
    --gpus N|N,N,...: GPUs; of one number also four halvings of it.
    """
    from phalanx.answers.tables import training_days

    output.show(training_days(params, tokens, rate, gpus), subject="scaling")


@command
def models(output: Printed, name: str | None = None) -> None:
    """List the model presets, or show one model's shape and parameters.

    name NAME|PATH: Show this model alone: a preset, a config.json, its folder, or TOML.
    """
    from phalanx.answers import presets

    output.show(presets.models() if name is None else presets.model(name))


@command
def clusters(output: Saved, name: str | None = None, nodes: int | None = None) -> None:
    """List the cluster presets: devices, dense FLOP/s, bandwidth of links in one direction.

    name NAME|FILE.toml: Show this preset alone, or the cluster of a file, with its sources.
    --nodes: Number of nodes of a preset; default 32.
    """
    from phalanx.answers import presets

    output.show(presets.clusters(name, nodes))


tables = forms(
    "Tabulate memory, communication, rooflines, scaling or the mesh; list the models and clusters that ship.",
    memory=forms(
        "Memory of state and activations.",
        lambda words: (
            "params"
            if has_option(words, "--params")
            else "model"
            if has_option(words, "--model") and not has_option(words, *_STEP_OPTIONS)
            else "strategy"
        ),
        strategy=memory_of_strategy,
        model=memory_of_model,
        params=memory_of_params,
    ),
    comm=forms(
        "What each mesh axis sends, and what is hidden.",
        lambda words: "params" if has_option(words, "--params") else "strategy",
        strategy=comm_of_strategy,
        params=comm_of_params,
    ),
    roofline=forms(
        "Ridge points and the intensity of operators.",
        lambda words: (
            "params"
            if has_option(words, "--params")
            else "chips"
            if words[0] in ("--json", "--save") and not has_option(words, "--model")
            else "strategy"
        ),
        default="chips",
        chips=roofline_of_chips,
        strategy=roofline_of_strategy,
        params=roofline_of_params,
    ),
    scaling=forms(
        "Strong and weak scaling; days of a training.",
        lambda words: "params" if has_option(words, "--params") else "model",
        model=scaling_of_model,
        params=scaling_of_params,
    ),
    mesh=mesh,
    models=models,
    clusters=clusters,
)
