# Source it in the repository's root: `. benchmarks/gpu/site.sh || exit 1`.
#
# For a GPU machine without an index: installs the wheels of `make gpu-wheels` into /tmp/site and makes `pegboard` importable from this
# tree, entry points included. No registry, no build, nothing written into the machine's own Python.
SITE=/tmp/site
mkdir -p $SITE
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $SITE .whl/*.whl || return 1
python3 benchmarks/gpu/site.py $SITE || return 1
[ -z "${OUT:-}" ] || export OUT
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python3 -c 'import pegboard, fastapi, zmq, msgspec; print("pegboard", pegboard.__version__, "from", *pegboard.__path__)'
