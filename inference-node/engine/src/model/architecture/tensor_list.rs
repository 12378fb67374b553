//! The tensors that an architecture consists of, with their shapes, and the check of a file against them.

use std::collections::HashSet;

use crate::model::architecture::Architecture;
use crate::model::architecture::family::Family;
use crate::model::file::ModelFile;
use crate::model::gguf::HeaderError;
use crate::model::tensors::TensorRole;

impl Architecture {
    /// The matrices of every layer, without their shapes.
    pub fn layer_matrices(&self) -> Vec<TensorRole> {
        self.matrix_shapes().into_iter().map(|(role, _)| role).collect()
    }

    /// The matrices of every layer with their (rows, columns).
    fn matrix_shapes(&self) -> Vec<(TensorRole, [u64; 2])> {
        let s = &self.shape;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let output = (TensorRole::AttentionOutput, [s.hidden, queries]);
        if let Some(experts) = self.experts {
            let mut all = vec![
                (TensorRole::Query, [queries, s.hidden]),
                (TensorRole::Key, [keys, s.hidden]),
                (TensorRole::Value, [keys, s.hidden]),
                output,
                (TensorRole::Router, [u64::from(experts.count), s.hidden]),
            ];
            for expert in 0..experts.count {
                all.push((TensorRole::ExpertGate(expert), [s.feed_forward, s.hidden]));
                all.push((TensorRole::ExpertUp(expert), [s.feed_forward, s.hidden]));
                all.push((TensorRole::ExpertDown(expert), [s.hidden, s.feed_forward]));
            }
            return all;
        }
        let down = (TensorRole::Down, [s.hidden, s.feed_forward]);
        if self.fused {
            let qkv = (TensorRole::QueryKeyValue, [queries + 2 * keys, s.hidden]);
            return vec![qkv, output, (TensorRole::GateUp, [2 * s.feed_forward, s.hidden]), down];
        }
        vec![
            (TensorRole::Query, [queries, s.hidden]),
            (TensorRole::Key, [keys, s.hidden]),
            (TensorRole::Value, [keys, s.hidden]),
            output,
            (TensorRole::Gate, [s.feed_forward, s.hidden]),
            (TensorRole::Up, [s.feed_forward, s.hidden]),
            down,
        ]
    }

    /// The vectors of every layer with their lengths, and whether they are required.
    fn vector_lengths(&self, family: &Family) -> Vec<(TensorRole, u64, bool)> {
        let s = &self.shape;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let mut all = vec![
            (TensorRole::AttentionNorm, s.hidden, true),
            (TensorRole::FeedForwardNorm, s.hidden, true),
            (TensorRole::AttentionOutputBias, s.hidden, false),
        ];
        if !family.fused {
            let bias = |role, length| (role, length, family.qkv_bias);
            all.extend([
                bias(TensorRole::QueryBias, queries),
                bias(TensorRole::KeyBias, keys),
                bias(TensorRole::ValueBias, keys),
            ]);
        }
        if family.head_norms {
            all.extend([(TensorRole::QueryNorm, s.head_dim, true), (TensorRole::KeyNorm, s.head_dim, true)]);
        }
        if family.post_norms {
            all.extend([
                (TensorRole::PostAttentionNorm, s.hidden, true),
                (TensorRole::PostFeedForwardNorm, s.hidden, true),
            ]);
        }
        all
    }

    /// Checks that every required tensor is present with its shape, and that no tensor would be ignored.
    pub(super) fn check_tensors(&self, file: &ModelFile, family: &Family) -> Result<(), HeaderError> {
        let s = &self.shape;
        let mut known = HashSet::new();
        let mut expect = |role: TensorRole, layer: u64, dims: &[u64], required: bool| {
            let name = self.tensor_name(file, role, layer);
            match self.tensor_meta(file, role, layer) {
                None if required => return Err(file.unsupported(format!("tensor {name} is missing"))),
                Some(meta) if meta.dims != dims => {
                    return Err(file.unsupported(format!("tensor {name} has shape {:?}, expected {dims:?}", meta.dims)));
                }
                None | Some(_) => {}
            }
            known.insert(name);
            Ok(())
        };
        expect(TensorRole::Embedding, 0, &[s.vocabulary, s.hidden], true)?;
        expect(TensorRole::OutputNorm, 0, &[s.hidden], true)?;
        expect(TensorRole::Output, 0, &[s.vocabulary, s.hidden], false)?;
        for layer in 0..s.layers {
            for (role, dims) in self.matrix_shapes() {
                expect(role, layer, &dims, true)?;
            }
            for (role, length, required) in self.vector_lengths(family) {
                expect(role, layer, &[length], required)?;
            }
        }
        if file.is_gguf() {
            let pairs = self.ropes.first().map_or(0, |r| r.frequencies.len() as u64);
            for role in [TensorRole::RopeFactors, TensorRole::RopeFactorsShort, TensorRole::RopeFactorsLong] {
                expect(role, 0, &[pairs], false)?;
            }
        }
        // Some exporters store RoPE's frequencies. They may be ignored, because they are computed here.
        match file.tensor_names().into_iter().find(|n| !known.contains(*n) && !n.ends_with("rotary_emb.inv_freq")) {
            Some(extra) => {
                Err(file.unsupported(format!("it has a tensor {extra:?}, which this version would have to ignore")))
            }
            None => Ok(()),
        }
    }
}
