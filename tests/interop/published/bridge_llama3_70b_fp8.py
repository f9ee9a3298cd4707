"""Settings of NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes/llama/h100/llama3.py, llama3_70b_pretrain_64gpu_h100_fp8cs_config."""


def llama3_70b_pretrain_64gpu_h100_fp8cs_config():
    """Fields that are set."""
    cfg = llama3_70b_pretrain_config()
    cfg.mixed_precision = _perf_precision('fp8_cs')
    cfg.tokenizer.vocab_size = 128256
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.context_parallel_size = 1
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.pipeline_model_parallel_layout = 'Et*2|(t*2|)*34,t*3|(t*2|)*3,tL'
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 256
    cfg.train.micro_batch_size = 1
    _llama_benchmark_common(cfg)
    _enable_overlap_param_gather_with_optimizer_step(cfg)
    return cfg
