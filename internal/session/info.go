package session

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

// rankInfo is all that a rank tells the others before they choose a backend. Every rank decides by
// the infos of all, so all decide the same.
type rankInfo struct {
	Verify    bool   // whether it compares calls
	Only      string // the only backend that it may use, "" for any
	Backends  []availability
	NCCLHost  string // NCCL_HOSTID, which may part ranks of one machine
	Topology  string // EURYALE_TOPOLOGY
	Hierarchy string // EURYALE_HIERARCHY
	Watched   bool   // whether it wants to know which ranks are late
	Seat      int    `json:",omitempty"` // of a process of an elastic job, see seatOf
}

// availability is what a rank has to say about one backend.
type availability struct {
	Name    string
	Problem string // "" if available
}

// Note returns the rankInfo of this rank as a note.
func Note(backends []backend.Backend) (string, error) {
	return note(backends, "", 0, false)
}

// note is Note of a process that has a seat, with only one of the backends unless that is "", and
// that may have been watched before.
func note(backends []backend.Backend, only string, seat int, watched bool) (string, error) {
	verify, err := env.Check.Read(os.Getenv)
	if err != nil {
		return "", err
	}
	lateness, err := env.Lateness.Read(os.Getenv)
	if err != nil {
		return "", err
	}
	only = cmp.Or(only, env.Backend.Read(os.Getenv))
	text, err := json.Marshal(rankInfo{verify, only, availabilities(backends, only),
		env.NCCLHostID.Read(os.Getenv), env.Topology.Text(os.Getenv), env.Hierarchy.Text(
			os.Getenv), watched || lateness || env.Metrics.Text(os.Getenv) != "", seat})
	return string(text), err
}

// exchangeInfos returns the infos of all ranks: those that they have told in Init, or, where not
// all have joined by it, those that they tell now.
func exchangeInfos(
	ctx context.Context, w *rendezvous.World, backends []backend.Backend,
) ([]rankInfo, error) {
	notes := w.Notes()
	if notes == nil || slices.Contains(notes, "") {
		mine, err := Note(backends)
		if err != nil {
			return nil, err
		}
		told, err := w.AllGather(ctx, "euryale/info", []byte(mine))
		if err != nil {
			return nil, err
		}
		notes = nil
		for _, note := range told {
			notes = append(notes, string(note))
		}
	}
	infos := make([]rankInfo, len(notes))
	for r, note := range notes {
		if err := json.Unmarshal([]byte(note), &infos[r]); err != nil {
			return nil, fmt.Errorf("rank %d: what rank %d tells cannot be read: %w", w.Rank, r, err)
		}
	}
	return infos, nil
}

// vote returns the backends that are available on every rank, at least one. Every
// rank sees the same, so all choose the same.
func vote(
	w *rendezvous.World, backends []backend.Backend, all []rankInfo,
) ([]backend.Backend, error) {
	var off []int // ranks that do not compare calls
	for r, info := range all {
		if !info.Verify {
			off = append(off, r)
		}
		if len(info.Backends) != len(backends) {
			return nil, fmt.Errorf("rank %d was started with %d backends, rank %d with %d: pass "+
				"the same to Init on every rank", w.Rank, len(backends), r, len(info.Backends))
		}
	}
	if len(off) > 0 && len(off) < len(all) {
		return nil, fmt.Errorf("rank %d: EURYALE_CHECK is off on ranks %v of %d, but not on "+
			"the others: calls are compared on all ranks or on none, so set it to the same on "+
			"every rank (off is faster, on finds ranks that disagree)", w.Rank, off, len(all))
	}
	var candidates []backend.Backend
	var problems []string
	for i, b := range backends {
		asked := func(r rankInfo) bool { return r.Only == "" || r.Only == b.Name() }
		if !slices.ContainsFunc(all, asked) {
			continue
		}
		if problem := unavailable(all, i); problem != nil {
			problems = append(problems, problem.Error())
			if w.Rank == 0 && candidates == nil && b.Name() == (host.Backend{}).Name() &&
				w.LocalSize == w.Size {
				fmt.Fprintf(os.Stderr,
					"euryale: not using backend host, the fastest on one machine: %v\n", problem)
			}
			continue
		}
		candidates = append(candidates, b)
	}
	if len(candidates) > 0 {
		return candidates, nil
	}
	if len(problems) == 0 {
		var names []string
		for _, b := range backends {
			names = append(names, b.Name())
		}
		problems = []string{fmt.Sprintf("EURYALE_BACKEND asks for %q: the backends are %s",
			all[w.Rank].Only, strings.Join(names, ", "))}
	}
	return nil, fmt.Errorf("rank %d: %w: %s", w.Rank, errNoBackend, strings.Join(problems, "; "))
}

func availabilities(backends []backend.Backend, only string) []availability {
	all := make([]availability, len(backends))
	for i, b := range backends {
		all[i].Name = b.Name()
		if only != "" && only != b.Name() {
			all[i].Problem = fmt.Sprintf("EURYALE_BACKEND asks for %q", only)
		} else if err := b.Available(); err != nil {
			all[i].Problem = err.Error()
		}
	}
	return all
}

// unavailable returns why backend i is not for these ranks, as the first rank that says so
// does, or nil.
func unavailable(all []rankInfo, i int) error {
	for r, info := range all {
		if name, first := info.Backends[i].Name, all[0].Backends[i].Name; name != first {
			return fmt.Errorf("backend %d is %q on rank %d and %q on rank 0: pass the same to "+
				"Init on every rank", i, name, r, first)
		}
		if problem := info.Backends[i].Problem; problem != "" {
			return fmt.Errorf("%s on rank %d: %s", info.Backends[i].Name, r, problem)
		}
	}
	return nil
}
