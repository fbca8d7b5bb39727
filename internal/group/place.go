package group

import "runtime"

// Place is where a rank runs. Ranks of one machine tell each other, so that they know whether
// all can poll at once.
type Place struct {
	Process string // the same for ranks of one process
	Cores   []int
}

// Here returns the place of this process.
func Here() Place {
	return Place{Process: Process(), Cores: allowedCores()}
}

// Places is a [Resource] that tells the ranks where each of them is.
type Places struct{ all []Place }

// Offer implements [Resource].
func (p *Places) Offer(pass int) (any, error) {
	if pass > 0 {
		return nil, nil
	}
	return Here(), nil
}

// Take implements [Resource].
func (p *Places) Take(pass int, offers Offers) (err error) {
	if pass == 0 {
		p.all, err = Read[Place](offers)
	}
	return err
}

// End implements [Resource].
func (p *Places) End(error) error { return nil }

// Of returns the places of some ranks of those that have told them.
func (p *Places) Of(ranks []int) []Place {
	var some []Place
	for _, r := range ranks {
		some = append(some, p.all[r])
	}
	return some
}

// Census counts the ranks in the process of rank r, and the cores that the ranks of all places
// may use between them.
func Census(places []Place, r int) (inProcess, cores int) {
	all := map[int]bool{}
	for _, p := range places {
		if p.Process == places[r].Process {
			inProcess++
		}
		for _, cpu := range p.Cores {
			all[cpu] = true
		}
	}
	if len(all) == 0 {
		return inProcess, runtime.NumCPU()
	}
	return inProcess, len(all)
}
