# Settings of NVIDIA/Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh.
ARGS=(
    --nproc_per_node 8
    --nnodes 1
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --rotary-base 1000000
    --num-experts 8
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer
    --micro-batch-size 1
    --global-batch-size 256
    --bf16
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
)
torchrun pretrain_gpt.py "${ARGS[@]}"
