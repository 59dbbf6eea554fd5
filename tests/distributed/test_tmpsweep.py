import sys, json; sys.path[:0]=["/work/main/tests/distributed"]
import test_construction as t, torch, pytest
from toolkit.families.support import all_families
from toolkit.families.tiny import tiny_config

def differing(recipe):
    import deepspeed
    from toolkit.train.model import build_model
    from toolkit.parallel.shard import shard_of, Shard
    model, cut = t.build(recipe)
    plain = build_model(recipe)
    whole = dict(plain.named_parameters(remove_duplicate=False))
    bufs=dict(plain.named_buffers())
    wrong=[]; held=set()
    for name,p in model.named_parameters():
        shard = shard_of(p) if cut is not None else None
        full=shard.name if shard else name
        want = shard.take(whole[full].detach()) if shard else whole[full]
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p,"ds_id")):
            if not torch.equal(p,want): wrong.append((name, p.shape, want.shape))
        held.add(full)
    for n,b in model.named_buffers():
        if n in bufs and not torch.equal(b,bufs[n]): wrong.append(("buf",n))
    return held,wrong,[n for n,_ in plain.named_parameters()]
def test_it(make_recipe, ranks, tmp_path):
    for n,f in all_families().items():
        if not f.pipeline: continue
        try:
            d=tmp_path/n; d.mkdir(); cfg=tiny_config(n); cfg.save_pretrained(d)
            par=[(2,{"zero_stage":3})]
            if f.tensor: par.append((2,{"tp":2}))
            if f.pipeline: par.append((2,{"pp":2}))
            for w,q in par:
                rs=ranks(differing,w,make_recipe(model={"name_or_path":str(d),"attn_implementation":"eager"},parallel=q))
                names=rs[0][2]; held=set().union(*(r[0] for r in rs))
                bad=[r[1] for r in rs if r[1]]
                print("RES",n,q,"ok" if not bad and set(names)<=held else ("BAD",bad[:1], sorted(set(names)-held)[:4]),flush=True)
        except Exception as e:
            print("RES",n,"EXC",str(e).strip().splitlines()[-1][:300] ,flush=True)
