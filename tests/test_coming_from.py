"""Names, arguments and options of Alpa, CFP and Aceso: each has a row on its page, is answered with
the same words where it is typed, and what the page says to type exists.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer
from command_line import run

import aliquot as aq
from aliquot.cli._app import app
from aliquot.cli._other_names import OTHER_NAMES, refuse_other_names
from aliquot.core import ARGUMENTS_ELSEWHERE, NAMES_ELSEWHERE
from aliquot.plans import Plan
from aliquot.runtime import Step

PAGE = (Path(__file__).parents[1] / "docs/coming-from.md").read_text()
# The text between backticks.
CODE = re.findall(r"`([^`]+)`", PAGE.replace("```", ""))

ALPA = """
init shutdown parallelize grad value_and_grad clear_executable_cache mark_pipeline_boundary
manual_remat automatic_remat manual_layer_construction automatic_layer_construction set_seed
get_global_num_devices get_global_cluster get_global_physical_mesh
get_global_virtual_physical_mesh set_global_virtual_physical_mesh prefetch plan_to_method
ParallelPlan timers tracer global_config ShardParallel DataParallel Zero2Parallel Zero3Parallel
PipeshardParallel ThreeDParallel get_3d_parallel_method LocalPipelineParallel CreateStateParallel
FollowParallel ManualShardingOption AutoShardingOption ManualLayerOption AutoLayerOption
FollowLayerOption AutoStageOption ManualStageOption UniformStageOption DeviceCluster
PhysicalDeviceMesh LocalPhysicalDeviceMesh DistributedPhysicalDeviceMesh VirtualPhysicalMesh
LogicalDeviceMesh PhysicalDeviceMeshGroup DistributedArray ReplicatedDistributedArray
ProfilingResultDatabase estimate_hlo_module_cost get_last_dp_result DataLoader MeshDriverDataLoader
save_checkpoint restore_checkpoint collective model serve torch
static_argnums donate_argnums batch_argnums devices num_micro_batches auto_sharding_option
default_auto_sharding_option manual_sharding_option pipeline_schedule layer_option stage_option
stage_input_shardings enable_auto_sharding force_data_parallel prefer_reduce_scatter
force_zero_stage_3 force_zero_stage_3_all_gather_threshold all_reduce_threshold
force_batch_dim_to_mesh_dim allow_all_gather allow_all_to_all allow_replicated_parameters
allow_recompute_heavy_op allow_mixed_mesh_shape force_simple_heuristic layer_num remat_mode
remat_layer fine_grained_remat_layer_num eps layer_eps cost_criteria submesh_physical_shape_space
manually_specified_submeshes submesh_logical_shape_space stage_imbalance_tolerance
use_hlo_cost_model profiling_database_filename cached_profile_result layer_profile_mode
forward_stage_layer_ids submesh_physical_shapes submesh_logical_shapes
submesh_autosharding_option_dicts num_stages submesh_physical_shape submesh_logical_shape
mesh_axis_names submesh_axis_names in_axis_resources out_axis_resources
pipeline_intermediate_axes gpipe 1f1b 1f1b_overlap_friendly inference
get_executable get_last_executable preshard_dynamic_args get_input_placement_specs
get_output_placement_specs get_parallel_plan get_hlo_text get_total_allocation_size
get_stage_allocation_size get_max_memory_allocated get_memory_allocated get_available_memory
reset_memory_stats get_execution_time_costs profile_with_dummy_inputs
profile_all_executable_with_dummy_inputs get_stage_execution_info dump_stage_execution_trace
dump_debug_info auto_sharding_objective flop_count sync sync_move_workers
moe_inference gpt_no_embedding_inference prof_database.pkl default.tsv
ALPA_DEBUG_PRINT_AS_STRATEGY ALPA_USE_AWS_EFA ALPA_IS_WORKER
--suite --shard-only --local --exp-name --num-hosts --num-devices-per-host --niter
--profile-driver-time --profile-stage-execution-time --no-separate-process --disable-tqdm
--max-comm-size-intra-node --max-comm-size-inter-node --efa --max-fail-retry --filename
--cache-filename --cluster-key
""".split()
CFP = """
--mode --config --d-model --batch-size --num-layer --device-num --data-type --parallel-block-opt
--debug-dir --enum-and-bench --dump-comm-volume DUMP_PROFILE_PARALLEL_BLOCK DUMP_COMM_VOLUME
LOSS_POS PB_NUM DEBUG_PB_GENERATION DEBUG_INST_ID forward_dot_count add_manual_pipeline_markers
strategy_map.txt reindex_array segment_mapping segment_profiling.pkl unique_seg_deps.pkl
segs_pb_specs.pkl after_ir.txt avgcost mem_cost TFLOP_COUNT tflops gpt_test.sh bert_test.sh
llama2_test.sh gpt_A100_8GPU.sh enum_and_benchmark
""".split()
ACESO = """
--model-name --model-size --num-layers --global-batch-size --micro-batch-size --num-nodes
--num-gpus-per-node --memory-limit --log-path --profiled-time-path --config-save-path
--config-suffix --max-num-hops --max-num-trials --time-budget-per-trial --time-budget-total
--start-num-stages --end-num-stages --op-group-size --max-op-move-steps --memory-pred-type
--initial-point --high-memory-rate --predict-delta-time --peak-mem-in-backward
--finetune-after-trial --support-comm-predict --sort-metric --num-of-saved-configs
--consider-collective-memory --save-to-csv --prof-tp-size --prof-path --prof-cache-file
--prof-model-name --prof-model-size --prof-repeat-times --prof-repeat-threshold
--prof-warmup-times --prof-warmup-threshold --prof-op-time-path --prof-mbs-list --max-data-size
--flexpipe-config --train-iters --eval-iters --lr-decay-iters --vocab-file --merge-file --data-impl
--split --distributed-backend --lr --lr-decay-style --min-lr --weight-decay --clip-grad
--lr-warmup-fraction --log-interval --DDP-impl --fp16
op_profiler.py comm_profiler.py aceso_search.py aceso_cost_model.py aceso_gpt_search.sh
aceso_t5_search.sh aceso_resnet_search.sh aceso_gpt_execute.sh megatron_gpt_search.sh
megatron_gpt_execute.sh alpa_gpt_search_execute.sh run_all_small.sh profile_small.sh
profile_large.sh get_e2e_performance.py get_search_cost.py get_perf_model_acc.py plot_fig7.sh
plot_fig8.sh plot_fig9.sh pretrain_gpt.py pretrain_t5.py pretrain_resnet.py profiled-time-miniset
profiled-time-eurosys single_gpu_configs top_configs trends num_stages num_gpus
checkpoint_activations resharding_stages num_ops_in_each_stage model_parallel_size_of_each_op
data_parallel_size_of_each_op recompute_ops algo_of_each_op NODE_RANK MASTER_ADDR MASTER_PORT
pssh-2nodes.host NCCL_SOCKET_IFNAME CUDA_VISIBLE_DEVICES
""".split()


def _verbs(group, path=("aliquot",)):
    for name, verb in getattr(group, "commands", {}).items():
        yield (*path, name), verb
        yield from _verbs(verb, (*path, name))


# Typer's own copy of click, or click itself.
UsageError = typer.BadParameter.__base__
VERBS = dict(_verbs(typer.main.get_command(app)))


@pytest.mark.parametrize("names", [ALPA, CFP, ACESO], ids=["alpa", "cfp", "aceso"])
def test_every_name_of_the_three_systems_is_on_the_page(names):
    assert sorted({*names} - {*CODE}) == []


def test_the_page_has_the_words_of_the_answers():
    texts = [("`".join(("", "`, `".join(names), "")), text) for names, _, text in OTHER_NAMES]
    for table in (NAMES_ELSEWHERE, ARGUMENTS_ELSEWHERE):
        for text in dict.fromkeys(table.values()):
            names = [name for name in table if table[name] == text]
            texts.append(("`" + "`, `".join(names) + "`", text))
    # Options are code on the page, and plain text in a terminal.
    rows = {line.replace("`", "") for line in PAGE.splitlines()}
    expected = [f"| {names} | {text} |".replace("`", "") for names, text in texts]
    assert [row for row in expected if row not in rows] == []


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_a_name_of_alpa_is_answered(name):
    assert not hasattr(aq, name)
    assert importlib.util.find_spec(f"aliquot.{name}") is None
    with pytest.raises(AttributeError, match=f"no attribute '{name}', which Alpa has.") as refused:
        getattr(aq, name)
    assert str(refused.value).endswith(NAMES_ELSEWHERE[name])
    with pytest.raises(ImportError) as not_imported:
        exec(f"from aliquot import {name}", {})
    assert str(not_imported.value) == str(refused.value)


def test_a_name_of_nobody_is_no_name_of_alpa():
    assert not hasattr(aq, "gradients")
    with pytest.raises(ImportError, match="cannot import name 'gradients' from 'aliquot'"):
        exec("from aliquot import gradients", {})


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (aq.PipeshardParallel, ("layer_option", "stage_option", "pipeline_schedule", "devices")),
        (aq.PipeshardParallel, ("default_auto_sharding_option", "stage_input_shardings")),
        (aq.ShardParallel, ("num_micro_batches", "auto_sharding_option", "manual_sharding_option")),
        (aq.Zero3Parallel, ("num_micro_batches",)),
        (aq.parallelize, ("static_argnums", "donate_argnums", "batch_argnums")),
    ],
)
def test_arguments_of_alpa_are_answered_all_at_once(method, arguments):
    with pytest.raises(aq.InputError, match=f"{method.__name__} has no such argument") as refused:
        method(**dict.fromkeys(arguments))
    assert all(
        f"{name} is Alpa's. {ARGUMENTS_ELSEWHERE[name]}" in str(refused.value) for name in arguments
    )


def test_own_arguments_of_these_names_and_unknown_ones_are_as_before():
    assert aq.PipeshardParallel(num_micro_batches=4).num_micro_batches == 4
    assert callable(aq.parallelize(num_micro_batches=4, devices=None))
    with pytest.raises(TypeError, match="unexpected keyword argument 'layer_options'"):
        aq.PipeshardParallel(layer_options=2)


def test_every_option_of_another_tool_is_answered_where_a_verb_has_its_counterpart():
    answered = set()
    for row, (names, here, instead) in enumerate(OTHER_NAMES):
        for verb in VERBS.values():
            if not any(here in (*p.opts, *p.secondary_opts) for p in verb.params):
                continue
            for name in names:
                try:
                    refuse_other_names(typer.Context(verb), [name, "1"])
                except UsageError as refused:
                    if str(refused.message) == f"There is no option {name}. Type {instead}.":
                        answered.add((row, name))
    every = {(row, name) for row, (names, _, _) in enumerate(OTHER_NAMES) for name in names}
    assert sorted(every - answered) == []


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("bench alpa --suite gpt.perf_test_auto", "the suite itself: aliquot bench alpa gpt"),
        ("bench alpa gpt.perf_test_fast_2d --shard-only --local", "nothing in its place: a suite"),
        ("bench alpa gpt --exp_name=x", "--out DIR"),
        ("aceso search --database d --memory-limit 12000", "--memory-limit-mb 12000"),
        ("aceso search --database d --num-nodes 1", "--nodes 2"),
        ("plan gpt-10m --num-nodes 2", "--cluster 8xH100"),
        ("blocks analyze moe-380m --mode analysis", "the verb: aliquot blocks analyze"),
        ("blocks profile gpt-10m --batch_size 24", "--global-batch 64"),
        ("train gpt-10m --flexpipe-config best.json", "--plan plan.json, written by"),
    ],
)
def test_options_of_the_three_systems_in_a_terminal(typed, instead):
    found = run(*typed.split())
    assert found.exit_code == 2
    assert f"Type {instead}" in found.stderr


def test_every_command_of_the_page_exists_and_takes_its_options():
    commands = [shlex.split(code) for code in CODE if code.startswith("aliquot ")]
    assert len(commands) > 40
    for words in commands:
        length = max(n for n in range(1, 4) if n == 1 or tuple(words[:n]) in VERBS)
        verb = VERBS[tuple(words[:length])]
        parser = verb.make_parser(typer.Context(verb))
        # Raises if an option is unknown or lacks its value.
        _, left, _ = parser.parse_args(words[length:])
        assert left == [], words


def test_every_option_of_the_page_is_one_of_a_command():
    known = {
        o for verb in VERBS.values() for p in verb.params for o in (*p.opts, *p.secondary_opts)
    }
    cells = [line.split(" | ")[-1] for line in PAGE.splitlines() if line.startswith("| `")]
    options = {
        word
        for cell in cells
        for code in re.findall(r"`([^`]+)`", cell)
        for word in code.split()
        if word.startswith("--") and not word.startswith("--xla_")
    }
    assert len(options) > 40
    assert sorted(options - known) == []


def test_every_python_name_of_the_page_exists():
    modules = {"aq": aq, "step": Step, "plan": Plan}
    found = [
        (owner, name)
        for code in CODE
        for owner, name in re.findall(r"(?<![\w.\"])(aq|step|plan)\.(\w+)", code)
        if name not in ("json", "html")
    ]
    assert len(found) > 60
    assert [pair for pair in found if not hasattr(modules[pair[0]], pair[1])] == []
    for name in re.findall(r"\baliquot\.((?:runtime|data|zoo)\.\w+)", PAGE):
        folder, _, attribute = name.partition(".")
        assert hasattr(getattr(aq, folder), attribute), name
