# NCCL's variables by fabric, to be sourced:  FABRIC=infiniband . examples/gpu/nccl.sh
# docs/gpu.md says why each is set. Names of interfaces and adapters are those of your nodes.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
case "${FABRIC:?is one of: node, infiniband, roce, efa, ethernet}" in
  node) ;;
  infiniband)
    export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-ib0}
    ;;
  roce)
    export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5}
    export NCCL_IB_GID_INDEX=${NCCL_IB_GID_INDEX:-3}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-eth0}
    ;;
  efa)
    export FI_PROVIDER=efa
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker}
    ;;
  ethernet)
    export NCCL_IB_DISABLE=1
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-eth0}
    ;;
  *) echo "FABRIC=$FABRIC is none of: node, infiniband, roce, efa, ethernet" >&2; return 2 2>/dev/null || exit 2 ;;
esac
# Gloo takes whole names alone. Where NCCL has a list of what to leave out, Gloo finds the interface of the host's name.
case "${NCCL_SOCKET_IFNAME:-lo}" in
  ^*) ;;
  *) export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${NCCL_SOCKET_IFNAME:-lo}} ;;
esac
