# Settings of NVIDIA/Megatron-LM, examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh.
ARGS=(
    --nproc_per_node 8
    --nnodes 1
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --attention-backend fused
    --untie-embeddings-and-output-weights
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --fp8-format hybrid
    --fp8-param-gather
    --tensor-model-parallel-size 1
    --context-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --tokenizer-type HuggingFaceTokenizer
    --vocab-size 128256
)
torchrun pretrain_gpt.py "${ARGS[@]}"
