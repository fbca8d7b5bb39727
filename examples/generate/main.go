// Command generate continues a text with a language model of a Hugging Face folder: GPT-2, Llama 2
// and 3, Mistral, Qwen 2 and 3. It prints the continuation as it comes, by whole characters.
//
//	go run ./examples/generate Llama-3.2-1B --prompt "The sea was" --temperature 0.8 --top-p 0.95
//	go run ./examples/generate gpt2 --adapter tuned < prompt.txt
//
// Without --prompt the standard input is the prompt. The text ends with a stop token of the model,
// after --max tokens, or where --context is full. Ctrl-C ends it, too, with exit status 130. A
// temperature of 0 takes the likeliest token each time; otherwise equal seeds draw equal texts.
//
// Flags that are not given, and stop tokens, are what the folder's generation_config.json says, and
// a line on standard error tells what that is. Where it gives no length, --max is 256.
//
// --adapter takes a LoRA adapter in PEFT's format, such as examples/finetune writes. The program
// uses one GPU if there is one, and the processor otherwise; with --tp, so does each of as many
// ranks, which shard the weights:
//
//	euryale run -n 2 ./examples/generate Llama-3.1-8B --tp 2 --prompt "The sea was"
//
// A line behind the text, on standard error, is for programs:
//
//	tokens=256 tokens/s=48.1 prompt=5 backend=host seconds=5.9
//
// Seconds include the time to load the model; tokens/s is from the first token on. The exit status
// is 2 for a wrong command line, 128 + n after signal n, and 1 for other failures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/models/tokenizer"
	"github.com/euryale-ml/euryale/vm"
)

// config is the command line.
type config struct {
	folder, prompt, adapter, precision, device string
	context, tp                                int
	sampling                                   models.Sampling
	given                                      map[string]bool // flags, by name
}

// precisions are the values of --precision.
var precisions = map[string]vm.Precision{"f32": vm.F32, "tf32": vm.TF32, "bf16": vm.BF16}

func main() {
	cfg := parse(os.Args[1:])
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	comm, err := euryale.Init(ctx)
	check(err)
	defer comm.Close()
	if cfg.tp > 1 || comm.Rank() == 0 { // without --tp a model runs on one rank
		check(cfg.generate(ctx, comm))
	}
}

// parse reads the command line. Flags may be before and behind the folder.
func parse(args []string) (cfg config) {
	flags := flag.NewFlagSet("generate", flag.ExitOnError)
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: generate FOLDER [flags]")
		flags.PrintDefaults()
	}
	s := &cfg.sampling
	s.Max = 256
	flags.StringVar(&cfg.prompt, "prompt", "", "the text to continue; empty: standard input")
	flags.StringVar(&cfg.adapter, "adapter", "", "a folder with a LoRA adapter in PEFT's format")
	flags.IntVar(&s.Max, "max", s.Max, "tokens of the continuation, unless the folder says")
	flags.Float64Var(&s.Temperature, "temperature", 0, "0 takes the likeliest token; 1 draws")
	flags.IntVar(&s.TopK, "top-k", 0, "draw of the K likeliest tokens; 0: of all")
	flags.Float64Var(&s.TopP, "top-p", 0, "draw of the likeliest tokens of this share; 0: of all")
	flags.Uint64Var(&s.Seed, "seed", 1, "of the draws")
	flags.IntVar(&cfg.context, "context", 0, "tokens of prompt and continuation; 0: what they need")
	flags.IntVar(&cfg.tp, "tp", 1, "ranks that shard the weights: all that there are")
	flags.StringVar(&cfg.precision, "precision", "f32", "of products: f32, tf32 or bf16")
	flags.StringVar(&cfg.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	_ = flags.Parse(args) // which exits
	if flags.NArg() > 0 {
		cfg.folder = flags.Arg(0)
		_ = flags.Parse(flags.Args()[1:])
	}
	cfg.given = map[string]bool{}
	flags.Visit(func(f *flag.Flag) { cfg.given[f.Name] = true })
	if err := cfg.check(flags.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(2)
	}
	return cfg
}

func (cfg config) check(rest []string) error {
	_, known := precisions[cfg.precision]
	s := cfg.sampling
	switch {
	case cfg.folder == "" || len(rest) > 0:
		return fmt.Errorf("give one folder of a model, and flags: got %q and %q", cfg.folder, rest)
	case min(s.Max, cfg.tp) < 1 || min(cfg.context, s.TopK) < 0:
		return fmt.Errorf("--max %d --tp %d --context %d --top-k %d: use a --max and a --tp of at "+
			"least 1, and no negative numbers", s.Max, cfg.tp, cfg.context, s.TopK)
	case !(s.TopP >= 0 && s.TopP <= 1 && s.Temperature >= 0):
		return fmt.Errorf("--top-p %v --temperature %v: use 0 to 1, and 0 or more", s.TopP,
			s.Temperature)
	case !known || cfg.device != "cpu" && cfg.device != "auto":
		return fmt.Errorf("--device %s --precision %s: use cpu or auto, and f32, tf32 or bf16",
			cfg.device, cfg.precision)
	}
	return nil
}

// generate prints the continuation, and a line about it, on rank 0.
func (cfg config) generate(ctx context.Context, comm backend.Communicator) error {
	began, out, say, together := time.Now(), io.Writer(os.Stdout), io.Writer(os.Stderr), comm
	if cfg.tp == 1 {
		together = autograd.Solo()
	} else if comm.Size() != cfg.tp {
		return fmt.Errorf("--tp %d, of %d ranks: start as many, by euryale run -n %d", cfg.tp,
			comm.Size(), cfg.tp)
	}
	if together.Rank() > 0 {
		out, say = io.Discard, io.Discard
	}
	fmt.Fprintln(say, "generate: loading", cfg.folder)
	m, err := models.Load(cfg.folder)
	if err != nil {
		return err
	}
	defer m.Close()
	if cfg.adapter != "" {
		if err := m.LoadAdapter(cfg.adapter); err != nil {
			return err
		}
	}
	vocabulary, err := tokenizer.Load(cfg.folder)
	if err != nil {
		return err
	}
	if cfg.prompt == "" && together.Rank() == 0 {
		text, err := io.ReadAll(os.Stdin)
		if err != nil {
			return err
		}
		cfg.prompt = string(text)
	}
	prompt, err := ofFirst(together, vocabulary.Encode(cfg.prompt, true))
	if err != nil {
		return err
	}
	said, err := cfg.sample(m, len(prompt))
	if err != nil {
		return err
	}
	layout, err := layers.NewLayout(together, 1, 1, cfg.tp)
	if err != nil {
		return err
	}
	defer layout.Close()
	g, err := cfg.load(comm, layout, m, len(prompt))
	if err != nil {
		return err
	}
	defer g.Close()
	fmt.Fprintln(say, said)
	tokens, first := 0, time.Time{}
	stream := vocabulary.Stream(true)
	err = g.Generate(ctx, [][]int{prompt}, cfg.sampling, func(_, token int) error {
		if tokens++; tokens == 1 {
			first = time.Now()
		}
		_, err := fmt.Fprint(out, stream.Next(token))
		return err
	})
	fmt.Fprintln(out, stream.End())
	var stop error // by a signal, to one of the ranks
	if err != nil && (ctx.Err() != nil || errors.Is(err, backend.ErrAborted)) {
		stop, err = autograd.Stopped(ctx, together)
	}
	if err != nil {
		return err
	}
	speed := 0.0
	if tokens > 1 {
		speed = float64(tokens-1) / time.Since(first).Seconds()
	}
	fmt.Fprintf(say, "tokens=%d tokens/s=%.1f prompt=%d backend=%s seconds=%.1f\n", tokens,
		speed, len(prompt), comm.Capabilities().Backend, time.Since(began).Seconds())
	return stop
}

// ofFirst returns the tokens that rank 0 has.
func ofFirst(comm backend.Communicator, tokens []int) ([]int, error) {
	if comm.Rank() > 0 {
		tokens = nil
	}
	n := float64(len(tokens))
	if err := autograd.Sum(comm, &n); err != nil {
		return nil, err
	}
	numbers, sums := make([]float64, int(n)), make([]*float64, int(n))
	for i := range numbers {
		if sums[i] = &numbers[i]; tokens != nil {
			numbers[i] = float64(tokens[i])
		}
	}
	err := autograd.Sum(comm, sums...)
	tokens = make([]int, len(numbers))
	for i, token := range numbers {
		tokens[i] = int(token)
	}
	return tokens, err
}

// sample completes the sampling by what the folder says, for a prompt of so many tokens. Flags that
// are given win. said is what was taken from the folder.
func (cfg *config) sample(m *models.Model, prompt int) (said string, err error) {
	flags := cfg.sampling
	greedy := cfg.given["temperature"] && flags.Temperature == 0
	s, err := m.Sampling(models.Sampling{Greedy: greedy, Temperature: flags.Temperature,
		Seed: flags.Seed})
	if err != nil {
		return "", err
	}
	if s.MaxLength > 0 && !cfg.given["max"] {
		if s.Max = s.MaxLength - prompt; s.Max < 1 {
			return "", fmt.Errorf("the prompt has %d tokens, and the folder's max_length is %d: "+
				"give --max", prompt, s.MaxLength)
		}
	}
	said = fmt.Sprintf("generate: from the folder: stop tokens %v", s.Stop)
	taken(&said, "temperature", &s.Temperature, flags.Temperature, cfg.given)
	if folder, err := m.Sampling(models.Sampling{}); greedy && (err != nil ||
		folder.Temperature > 0) {
		said += ", but not how it draws (--temperature 0)"
	}
	if s.Temperature == 0 {
		s.TopK, s.TopP, s.MinP = 0, 0, 0 // which are for draws
	}
	taken(&said, "top-k", &s.TopK, flags.TopK, cfg.given)
	taken(&said, "top-p", &s.TopP, flags.TopP, cfg.given)
	taken(&said, "min-p", &s.MinP, 0, cfg.given)
	taken(&said, "repetition penalty", &s.RepetitionPenalty, 1, cfg.given)
	taken(&said, "max", &s.Max, flags.Max, cfg.given)
	cfg.sampling = s
	return said, nil
}

// taken keeps the folder's value and says so, unless there is none or the flag is given.
func taken[T comparable](said *string, name string, folder *T, flag T, given map[string]bool) {
	var none T
	if given[name] || *folder == none {
		*folder = flag
	} else if *folder != flag {
		*said += fmt.Sprintf(", %s %v", name, *folder)
	}
}

// load returns a generator for a prompt of so many tokens.
func (cfg config) load(comm backend.Communicator, layout *layers.Layout, m *models.Model,
	prompt int) (*models.Generator, error) {
	o := models.GenerateOptions{Context: cfg.context, Precision: precisions[cfg.precision],
		Layout: layout}
	if o.Context == 0 {
		o.Context = max(prompt, min(prompt+cfg.sampling.Max, m.Positions))
	}
	if prompt == o.Context { // more are an error of Generate
		return nil, fmt.Errorf("the prompt has %d tokens, for which the context has room, "+
			"and for no more: use a larger --context, of at most %d, or a shorter prompt", prompt,
			m.Positions)
	}
	device := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[cfg.device]
	return models.NewGenerator(m, device, o)
}

func check(err error) { usage.End("generate", err) }
