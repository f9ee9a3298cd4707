"""Settings of pytorch/torchtitan, torchtitan/models/llama3/config_registry.py, llama3_405b."""


def llama3_405b():
    """Fields that are set."""
    model_spec = model_registry("405B", converters=[Float8LinearConverter.Config()])
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=16384,
            max_context_length=8192,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=8,
        ),
        compile=CompileConfig(
            enable=True,
            enable_async_tensor_parallel=True,
        ),
        activation_checkpoint=FullAC.Config(),
    )
