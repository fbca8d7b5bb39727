package vm_test

import (
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Graphs of Gorgonia v0.9.18's own examples, small, without their data. Where an example draws
// random numbers (dropout, corruption), the graph here has a variable with fixed ones, and where it
// uses the lisp machine, it is differentiated by gorgonia.Grad.

// resnet is the example of that name: convolutions, each with a product of its pooled output added.
func resnet(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, y := m.variable("x", dt, 2, 1, 4, 4), m.variable("y", dt, 2, 3)
	w0, w1, w1r := m.variable("w0", dt, 2, 1, 3, 3), m.variable("w1", dt, 3, 2, 3, 3),
		m.variable("w1r", dt, 3, 12)
	w3, w4 := m.variable("w3", dt, 12, 5), m.variable("w4", dt, 5, 3)
	m.params = nodes{w0, w1, w1r, w3, w4}
	same := func(x, w node) node {
		return must(gorgonia.Conv2d(x, w, tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1},
			[]int{1, 1}))
	}
	pooled := func(x node) node {
		return must(gorgonia.MaxPool2D(relu(x), tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
	}
	c1 := same(pooled(same(x, w0)), w1)
	r1 := mul(reshape(pooled(c1), tensor.Shape{2, 3}), w1r)
	s1 := add(c1, reshape(r1, c1.Shape()))
	fc := relu(mul(reshape(s1, tensor.Shape{2, 12}), w3))
	out := must(gorgonia.SoftMax(mul(fc, w4)))
	m.grad(t, neg(mean(times(out, y))))
	return m
}

// gate is act(wx x + wh h + b), with weights of its own.
func (m *model) gate(dt tensor.Dtype, name string, size, inputs int, act function) func(x,
	h node) node {
	wx, wh, b := m.variable("wx"+name, dt, size, inputs), m.variable("wh"+name, dt, size, size),
		m.variable("b"+name, dt, size)
	m.params = append(m.params, wx, wh, b)
	return func(x, h node) node {
		sum := add(mul(wx, x), mul(wh, h))
		return must(act(add(sum, b)))
	}
}

// lstm is one layer of charRNN.
func (m *model) lstm(dt tensor.Dtype, name string, size, inputs int) func(x, hidden,
	cell node) (h, c node) {
	input := m.gate(dt, "i"+name, size, inputs, gorgonia.Sigmoid)
	forget := m.gate(dt, "f"+name, size, inputs, gorgonia.Sigmoid)
	output := m.gate(dt, "o"+name, size, inputs, gorgonia.Sigmoid)
	write := m.gate(dt, "c"+name, size, inputs, gorgonia.Tanh)
	return func(x, hidden, cell node) (h, c node) {
		retained := times(forget(x, hidden), cell)
		c = add(retained, times(input(x, hidden), write(x, hidden)))
		return times(output(x, hidden), tanh(c)), c
	}
}

// charRNN is the example of that name: two LSTM layers over a sentence, with its perplexity.
func charRNN(t testing.TB, dt tensor.Dtype) *model {
	const vocabulary, embedded, size = 6, 4, 3
	m := &model{g: gorgonia.NewGraph()}
	embedding, decoder, bias := m.variable("embedding", dt, vocabulary, embedded),
		m.variable("whd", dt, vocabulary, size), m.variable("bias", dt, vocabulary)
	m.params = nodes{embedding, decoder, bias}
	layers := []func(x, hidden, cell node) (h, c node){
		m.lstm(dt, "0", size, embedded), m.lstm(dt, "1", size, size)}
	var hidden, cell [2]node
	for i := range layers {
		hidden[i], cell[i] = m.variable(fmt.Sprint("hidden", i), dt, size),
			m.variable(fmt.Sprint("cell", i), dt, size)
	}
	var cost, perplexity node
	sentence := []int{0, 3, 2, 3, 5}
	for i, char := range sentence[:len(sentence)-1] {
		x := must(gorgonia.Slice(embedding, gorgonia.S(char)))
		for l, layer := range layers {
			hidden[l], cell[l] = layer(x, hidden[l], cell[l])
			x = hidden[l]
		}
		probabilities := must(gorgonia.SoftMax(add(mul(decoder, x), bias)))
		loss := must(gorgonia.Slice(neg(must(gorgonia.Log(probabilities))),
			gorgonia.S(sentence[i+1])))
		log2 := must(gorgonia.Slice(neg(must(gorgonia.Log2(probabilities))),
			gorgonia.S(sentence[i+1])))
		if cost == nil {
			cost, perplexity = loss, log2
		} else {
			cost, perplexity = add(cost, loss), add(perplexity, log2)
		}
	}
	var read gorgonia.Value
	gorgonia.Read(perplexity, &read)
	m.grad(t, cost)
	return m
}

// dense is sigmoid(x w + b), with a bias for each sample, as stacked_autoencoder has it.
func (m *model) dense(dt tensor.Dtype, name string, x node, size int) (w, b, y node) {
	w, b = m.variable("w"+name, dt, x.Shape()[1], size), m.variable("b"+name, dt, x.Shape()[0],
		size)
	m.params = append(m.params, w, b)
	return w, b, sigmoid(add(mul(x, w), b))
}

// reconstruction is the loss of a denoising autoencoder of x with tied weights.
func (m *model) reconstruction(dt tensor.Dtype, name string, x, w, b node) node {
	noise, back := m.variable("noise"+name, dt, x.Shape()...), m.variable("back"+name, dt,
		x.Shape()...)
	m.params = append(m.params, back)
	hidden := sigmoid(add(mul(times(noise, x), w), b))
	again := sigmoid(add(mul(hidden, transpose(w)), back))
	return mean(must(gorgonia.BinaryXent(again, x)))
}

// pretraining is the first part of stacked_autoencoder: autoencoders of two layers.
func pretraining(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", dt, 4, 6)
	w0, b0, h := m.dense(dt, "0", x, 5)
	w1, b1, _ := m.dense(dt, "1", h, 3)
	m.grad(t, add(m.reconstruction(dt, "0", x, w0, b0), m.reconstruction(dt, "1", h, w1, b1)))
	return m
}

// finetuning is its second part: the log-probabilities of the right classes, each sliced out.
func finetuning(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	_, _, h := m.dense(dt, "0", m.variable("x", dt, 4, 6), 5)
	w, b := m.variable("w", dt, 5, 3), m.variable("b", dt, 4, 3)
	m.params = append(m.params, w, b)
	p := must(gorgonia.SoftMax(add(mul(h, w), b)))
	logs := neg(must(gorgonia.Log(p)))
	var losses nodes
	for i, class := range []int{2, 0, 1, 2} {
		losses = append(losses, must(gorgonia.Slice(logs, gorgonia.S(i), gorgonia.S(class))))
	}
	m.grad(
		t, must(gorgonia.Div(must(gorgonia.ReduceAdd(losses)), constant(dt, float64(len(losses))))))
	return m
}

// stockExamples are the examples that train: see also models.
var stockExamples = map[string]func(testing.TB, tensor.Dtype) *model{
	"resnet": resnet, "charRNN": charRNN, "pretraining": pretraining, "finetuning": finetuning,
}

// TestStockExamples compares Gorgonia's own examples with the tape machine, or tiny-yolo's
// inference with every operation's Do.
func TestStockExamples(t *testing.T) {
	for name, build := range stockExamples {
		for where, device := range devices {
			for dt, tolerance := range tolerances {
				t.Run(fmt.Sprint(name, " ", where, " ", dt), func(t *testing.T) {
					trainsAsTheTapeMachine(t, build, device(t), dt, tolerance)
				})
			}
		}
	}
	for dt, tolerance := range tolerances {
		t.Run(fmt.Sprint("tiny-yolo ", dt), func(t *testing.T) {
			agree(t, tinyYOLO(dt).g, tolerance, 0, devices)
		})
	}
}

// tinyYOLO is the example tiny-yolo-v3-coco, without most of its layers: convolutions with biases
// and leaky activations, pools, and a route over an upsampled image.
func tinyYOLO(dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	layer := 0
	convolution := func(x node, filters, kernel int) node {
		layer++
		w := m.variable(fmt.Sprint("w", layer), dt, filters, x.Shape()[1], kernel, kernel)
		y := must(gorgonia.Conv2d(x, w, tensor.Shape{kernel, kernel}, []int{kernel / 2, kernel / 2},
			[]int{1, 1}, []int{1, 1}))
		return must(gorgonia.LeakyRelu(add(y, m.variable(fmt.Sprint("b", layer), dt, y.Shape()...)),
			0.1))
	}
	pool := func(x node) node {
		return must(gorgonia.MaxPool2D(x, tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
	}
	early := convolution(m.variable("x", dt, 1, 3, 8, 8), 4, 3)
	late := convolution(pool(early), 3, 1)
	route := must(gorgonia.Concat(1, must(gorgonia.Upsample2D(late, 2)), early))
	convolution(route, 2, 3)
	return m
}
