package fit

import (
	"context"
	"errors"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/observe"
)

// trainElastic is train on ranks that may be lost and replaced. All that they exchange is in turns,
// which the others repeat. Which turn comes next depends on t.past alone, which replacements get.
func (t *trainer) trainElastic(ctx context.Context, r *Result) error {
	if err := t.elastic.Share(&t.past); err != nil {
		return err
	}
	var err error
	if t.past.Training == "" {
		err = t.turn(ctx, t.begin)
	} else { // the others train
		t.comm = autograd.Solo()
		err = t.prepare()
	}
	defer func() { t.loader.close() }()
	for err == nil && !t.done() {
		p := t.past
		switch {
		case p.Step == t.sampler.Steps():
			err = t.turn(ctx, func() error { return t.endEpoch(false) })
		case t.every > 0 && p.Steps%t.every == 0 && p.Steps > p.Saved && p.Step > 0:
			err = t.turn(ctx, func() error { return t.saveWithin(false) })
		default:
			err = t.stepElastic(ctx)
		}
		if err == nil && t.elastic.Ends() && !t.done() {
			err = t.turn(ctx, func() error { return t.saveWithin(true) })
			if err == nil && t.elastic.Ends() {
				return t.stopped(exit.By(ctx), t.kept())
			}
		}
	}
	if err != nil {
		return err
	}
	var end Result
	err = t.turn(ctx, func() error {
		end = Result{}
		told := t.trackUntold() // by who is rank 0 since the last epoch
		return t.end(autograd.Agree(t.comm, "", errors.Join(t.hooked, told)), &end)
	})
	r.Best, r.Params = end.Best, end.Params
	return err
}

// saveWithin saves within an epoch.
func (t *trainer) saveWithin(ends bool) error {
	t.past.Saved = t.past.Steps
	return t.save(ends)
}

// turn makes collective calls, which may change t.past: it is what they leave once all ranks have
// made them.
func (t *trainer) turn(ctx context.Context, calls func() error) error {
	var next past
	return t.do(ctx, autograd.Turn{Exchange: func() error {
		before := t.past
		defer func() { next, t.past = t.past, before }()
		return calls()
	}, Apply: func(float64) { t.past = next }})
}

// stepElastic does a step.
func (t *trainer) stepElastic(ctx context.Context) error {
	var mean float64
	err := t.do(ctx, autograd.Turn{Run: t.runElastic, Exchange: func() error {
		_, _, err := t.vote(context.Background(), 0, t.hooked)
		return err
	}, Apply: func(loss float64) { mean = t.count(loss * float64(t.all)) }})
	if err == nil && !finite(mean) {
		return t.turn(ctx, func() error { return t.whyNotFinite(mean) })
	}
	return err
}

// runElastic runs a micro-batch of the step, and returns the sum of its losses.
func (t *trainer) runElastic(micro int) (loss float64, err error) {
	t.regroup()
	i := micro - t.first
	if i == 0 {
		err = t.beginStep()
	}
	if loss, err = t.run(i, errors.Join(err, t.next())); err != nil {
		err = errors.Join(t.blamed, t.inStep(err))
	}
	return loss, err
}

// do does a turn. A rank that was told to stop leaves after it.
func (t *trainer) do(ctx context.Context, turn autograd.Turn) error {
	if by := exit.By(ctx); by > 0 {
		t.elastic.Retire(t.stopped(by, "the other ranks go on"))
	}
	exchange := turn.Exchange
	turn.Exchange = func() error {
		t.regroup()
		t.shared = exchange()
		return t.shared
	}
	return t.elastic.Do(turn)
}

// alone reports whether other ranks may train on after an error of this one.
func (t *trainer) alone(why error) bool {
	return t.elastic != nil && !t.elastic.Ends() && t.elastic.Size() > 1 &&
		(t.shared == nil || !errors.Is(why, t.shared))
}

// regroup goes on with the ranks of a new generation, from where the training is.
func (t *trainer) regroup() {
	comm := t.elastic.Comm()
	if t.comm == comm && t.loader != nil {
		return
	}
	t.loader.close()
	t.comm, t.dp, t.watch = comm, t.elastic.DataParallel(), observe.WatchOf(comm)
	if t.past.Training == "" { // it begins
		return
	}
	t.first, t.runs, _ = t.machine.MicroBatches()
	t.flops = t.machine.Summary().FLOPs * int64(t.runs)
	t.loader = load(t.data, t.readers, t.jobs(len(t.past.Epochs), t.past.Step))
	t.watch.Begin()
}
