"""Settings of NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes/deepseek/h100/deepseek_v3.py, deepseek_v3_pretrain_1024gpu_h100_bf16_config."""


def deepseek_v3_pretrain_1024gpu_h100_bf16_config():
    """Fields that are set."""
    cfg = deepseek_v3_pretrain_config()
    cfg.mixed_precision = _perf_precision('bf16')
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.context_parallel_size = 1
    cfg.model.expert_model_parallel_size = 64
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 16384
    cfg.train.micro_batch_size = 1
    cfg.model.recompute_modules = ['mla_up_proj', 'mlp']
    cfg.ddp.overlap_grad_reduce = False
    _deepseek_v3_common(cfg)
    set_deepseek_v3_pipeline_model_parallel_layout(cfg.model, 'Et|(tt|)*30mL')
    _benchmark_common(cfg)
    _enable_overlap_param_gather_with_optimizer_step(cfg)
    return cfg
