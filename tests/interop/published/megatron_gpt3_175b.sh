# Settings of NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh.
ARGS=(
    --nproc_per_node 8
    --nnodes 1
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
    --micro-batch-size 1
    --global-batch-size 1536
    --step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    --fp16
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
torchrun pretrain_gpt.py "${ARGS[@]}"
