package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/fault"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// choose connects on the backend that the ranks choose. The recorder is told of phases. watched is
// whether a rank wants to know which ones are late.
func choose(
	ctx context.Context, w *rendezvous.World, backends []backend.Backend,
	recorder *observe.Recorder, generation int,
) (comm backend.Communicator, watched bool, err error) {
	if err := lowLatency(); err != nil {
		return nil, false, err
	}
	plan, err := plannedFault(w.Size, generation)
	if err != nil {
		return nil, false, err
	}
	infos, err := exchangeInfos(ctx, w, backends)
	if err != nil {
		return nil, false, err
	}
	watched = slices.ContainsFunc(infos, func(r rankInfo) bool { return r.Watched })
	verify := infos[w.Rank].Verify
	candidates, err := vote(w, backends, infos)
	if err != nil {
		return nil, false, verdict{err, -1}
	}
	comm, err = first(ctx, w, candidates, infos)
	if err != nil {
		return nil, false, err
	}
	// Comparing comes first: a hierarchical call takes part in it.
	if comm, err = withHierarchy(ctx, w, group.Compared(comm), infos, recorder); err != nil {
		return nil, false, err
	}
	if compare := comm.Capabilities().Verify; compare != nil {
		compare(verify)
	}
	if plan != nil {
		comm = fault.New(comm, *plan)
	}
	return comm, watched, nil
}

// first connects on the first backend that can carry these ranks: more ranks than
// GPUs, say, are found out when they connect. The error is then ErrUnsupported on
// every rank, so all go on to the next.
func first(
	ctx context.Context, w *rendezvous.World, candidates []backend.Backend, infos []rankInfo,
) (backend.Communicator, error) {
	for i, b := range candidates {
		comm, err := connectBy(ctx, w, b, infos)
		if !errors.Is(err, backend.ErrUnsupported) || i == len(candidates)-1 {
			return comm, err
		}
		if w.Rank == 0 {
			_, why, _ := strings.Cut(err.Error(), backend.ErrUnsupported.Error()+": ")
			fmt.Fprintf(os.Stderr, "euryale: using backend %s and not %s: %s\n",
				candidates[i+1].Name(), b.Name(), why)
		}
	}
	return nil, verdict{errNoBackend, -1}
}

// connectBy connects on a backend, with the groups of hierarchical calls where it can do that at
// once.
func connectBy(
	ctx context.Context, w *rendezvous.World, b backend.Backend, infos []rankInfo,
) (backend.Communicator, error) {
	if c, ok := b.(group.Connector); ok {
		ways, err := likelySplits(ctx, w, infos)
		if err != nil {
			return nil, err
		}
		return c.ConnectSplit(ctx, w, ways)
	}
	return b.Connect(ctx, w)
}

// lowLatency checks EURYALE_LOWLATENCY, which package gpu goes by, whatever the backend.
func lowLatency() error {
	_, err := gpu.Asked("")
	return err
}

// plannedFault reads EURYALE_FAULT. The plan is nil where there is none, and where
// the job has been restarted, or goes on after a fault.
func plannedFault(size, generation int) (*fault.Plan, error) {
	text := env.Fault.Text(os.Getenv)
	if text == "" || generation > 0 {
		return nil, nil
	}
	plan, err := fault.Parse(text)
	if err == nil {
		err = plan.Check(size)
	}
	if err != nil {
		return nil, env.Fault.Wrong(text, err)
	}
	if restarts := env.Restarts.Read(os.Getenv); restarts != "" && restarts != "0" {
		return nil, nil
	}
	return &plan, nil
}
